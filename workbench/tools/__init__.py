"""Tools around recipes, other than running them.

    as_backend       our passes under `torch.compile`
    as_graph_pass    our passes in other compilers' pipelines
    command_end      a command's exit status, its errors, and what it leaves running
    compatibility    tables of tests by torch version
    doctor           what this machine can do
    fingerprint      fingerprints of code and data
    own_files        import the user's files
    schedule         whether all ranks launch the same collectives
    variant          one variant in figures and verdicts
    what_if          change a recipe, run again what changes
"""
