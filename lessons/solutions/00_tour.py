"""Answers to the checkpoints of 00_tour; kept apart from the notebook."""


def which_pass(records) -> str:
    """The pass whose effect verdict says NO_EFFECT; `records` is the pipeline's list of PassRecord."""
    return next(r.name for r in records if any(v.outcome == "NO_EFFECT" for v in r.verdicts))
