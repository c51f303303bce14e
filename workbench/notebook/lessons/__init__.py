"""The course: lessons, their checkpoints, and running them without a browser.

    commands     `workbench course`, `lessons`, `check`, `hint`
    course       runs all notebooks, and writes a page of results
    course_site  the executed lessons as pages without a kernel
    grading      scores of guesses and answers
    headless     runs one lesson's notebook by papermill
    lesson       Lesson: question, parameters, checkpoints
    scores       a reader's best scores
"""
