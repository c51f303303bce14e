"""The names of the packages; pyproject.toml has all else."""

from setuptools import find_namespace_packages, find_packages, setup

LESSONS = find_namespace_packages("lessons", include=["l*", "recipes"], exclude=["*__pycache__"])

setup(packages=[*find_packages(include=["workbench", "workbench.*"]),
                "workbench_lessons", *(f"workbench_lessons.{name}" for name in LESSONS)])
