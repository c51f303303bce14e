"""What "The tour" alone uses.

    pass_chips  passes on and off, and their order
    tour        tables of the step and of recorded steps; graders
"""
