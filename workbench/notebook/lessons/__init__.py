"""The course: lessons, their checkpoints, and running them without a browser.

    budgets        memory budgets as estimated, and as they ran on GPUs
    commands       `workbench course`, `lessons`, `check`, `hint`
    course         runs all notebooks, and writes a page of results
    course_site    the executed lessons as pages without a kernel
    expert_slots   the grader of "Route tokens to experts": bytes as slots of each expert
    fewer_bits     what "Fewer bits, proved" measures and asks
    gather_order   the gathers of a forward as boxes, each with its module
    grading        scores of guesses and answers
    headless       runs one lesson's notebook by papermill
    lesson         Lesson: question, parameters, checkpoints
    link_costs     graders of "Bucket and overlap"
    propose        a contract from a pass's first run, for "Write your own pass"
    scores         a reader's best scores
    step_memory    what "Capture a joint graph" draws and grades: bytes alive by kind
    suspects       the pipelines of "Find the wrong pass"
    tour           what "The tour" shows and asks
    traces         what "Read your own trace" reads
    traces_graded  its graders
    two_captures   what "Two captures" looks up: wrong modules, readers of saved tensors
    whole_steps    what "One graph for the whole step" counts and asks
"""
