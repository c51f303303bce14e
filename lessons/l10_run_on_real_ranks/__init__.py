"""What "Run on real ranks" alone uses.

    program_counters  which rank launches which collective next; its grader
"""
