"""What "Write your own pass" alone uses.

    propose  a contract from a pass's first run
"""
