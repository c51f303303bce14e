"""The names of the packages, and what a wheel holds beside them; pyproject.toml has all else."""

from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup
from setuptools.command.build_py import build_py

LESSONS = find_namespace_packages("lessons", include=["course", "l*", "recipes"], exclude=["*__pycache__"])
RESULTS = ("course/*.json", "compat_torch_*.json", "traces_h200/*", "traces_h200x2/*", "llama3_1b_h200x2.jsonl",
           "llama3_1b_h200x4.jsonl", "notebook_10_h200x4.json", "whole_step_h200x1.jsonl",
           "float8_numerics_gloo.json", "float8_products_h200.json", "causal_attention_h200x1.jsonl",
           "pipeline_16_cores.jsonl")
COURSE = ("notebooks/*.ipynb", "examples/*.py", "docs/**/*.md", "docs/**/*.svg",
          *(f"benchmarks/results/{name}" for name in RESULTS))
"""What the course reads: notebooks, examples, the documents that they link, and recorded results."""


class BuildWithCourse(build_py):
    """A wheel holds COURSE under workbench_lessons, so that the package needs no checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in course_files():
                target = Path(self.build_lib, "workbench_lessons", path)
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *map(str, course_files())]


def course_files() -> list[Path]:
    """The files of COURSE, in the checkout."""
    return sorted(path for pattern in COURSE for path in Path().glob(pattern))


setup(packages=[*find_packages(include=["workbench", "workbench.*"]),
                "workbench_lessons", *(f"workbench_lessons.{name}" for name in LESSONS)],
      cmdclass={"build_py": BuildWithCourse})
