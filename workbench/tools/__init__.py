"""Tools around recipes, other than running them.

    command_end      a command's exit status, its errors, and what it leaves running
    compatibility    tables of tests by torch version
    doctor           what this machine can do
    own_files        import the user's files
"""
