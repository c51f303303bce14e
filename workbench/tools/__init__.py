"""What one does with a recipe beside running it.

    ablate           which passes, options and orders pay
    as_backend       our passes under `torch.compile`
    as_graph_pass    our pass as a function for other pipelines
    bisect           build a recipe, find the first pass that fails
    command_line     commands and their arguments
    compatibility    tables of tests by torch version
    doctor           what this machine can do
    export_script    a recipe as one script for torchrun
    fingerprint      fingerprints of code and data
    inductor_passes  which passes Inductor ran on a recipe
    look_inside      what Inductor makes of a function
    matrix           recipes times repeats, in one table
    moved_names      where old import paths have gone
    propose          propose a contract from a pass's first run
    schedule         do all ranks launch the same collectives
    source_code      source of a user's functions and files
    traces           what a traced job communicates and hides
    user_kernel      a user's Triton kernel
    variant          one variant in figures and verdicts
    what_if          change a recipe, run again what changes
"""
