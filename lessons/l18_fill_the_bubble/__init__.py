"""What "Fill the bubble" alone uses.

    pictures        bytes that ranks hold, transfers that do not match, and recorded steps
    schedule_board  drag computations in the lanes of ranks; its graders
"""
