"""What a user has registered in this process, to be sent to ranks: passes and model families."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.parallel.families import Family, install_families, own_families
from workbench.passes.registry import RegisteredPass, install_passes, own_passes


@dataclass(frozen=True)
class Own:
    """A user's own passes and model families."""

    passes: list[RegisteredPass]
    families: list[Family]


def own() -> Own:
    """Those of this process."""
    return Own(own_passes(), own_families())


def install(theirs: Own) -> None:
    """Register what came from another process."""
    install_passes(theirs.passes)
    install_families(theirs.families)
