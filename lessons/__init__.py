"""The lessons, installed as `workbench_lessons`.

A folder holds a lesson's declaration, its solutions, and the graders, moments and pictures that it alone uses.
"""
