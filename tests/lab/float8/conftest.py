from passes.conftest import authored, captured_once, through  # noqa: F401  fixtures
