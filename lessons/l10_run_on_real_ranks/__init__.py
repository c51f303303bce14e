"""What "Run on real ranks" alone uses.

    pictures          where each rank stood when a call failed
    program_counters  which rank launches which collective next
    programs          programs that hang, and what the checkpoints count of them
    traces            what torchfrtrace says of a hang
"""
