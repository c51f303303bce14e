"""The course: lessons, their checkpoints, and running them without a browser.

    commands  `workbench course`, `lessons`, `check`, `hint`
    course    every lesson's notebook, and one page of results
    grading   scores of guesses and answers
    headless  one lesson's notebook, run by papermill
    lesson    Lesson: question, parameters, checkpoints
    schemas   JSON schemas for editors
    scores    what a reader has reached
"""
