"""What "Read your own trace" uses, and in part "One graph for the whole step".

    pictures       kernels over time, and the times of many steps
    traces         recorded traces, and small ones made by hand: gaps, late launches, waits
    traces_graded  the graders
"""
