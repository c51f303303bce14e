"""What "Run on real ranks" alone uses.

    launches          how many collectives a rank has launched
    pictures          where each rank stood when a call failed
    program_counters  which rank launches which collective next; its grader
"""
