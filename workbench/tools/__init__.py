"""Tools around recipes, other than running them.

    command_end      a command's exit status, its errors, and what it leaves running
    compatibility    tables of tests by torch version
    doctor           what this machine can do
    fingerprint      fingerprints of code and data
    own_files        import the user's files
    variant          one variant in figures and verdicts
    what_if          change a recipe, run again what changes
"""
