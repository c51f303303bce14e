"""What "Compile everything" alone uses.

    launches      launches by kind, strips of calls, and recorded steps
"""
