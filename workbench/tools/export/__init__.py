"""A recipe's compiled step as files, which every rank loads at once.

    artifact      an artifact's files: manifest, fingerprint, refusals
    code          one graph, or what Inductor made of it, as a Python file
    compiled      compile_recipe: the recipe as each of its ranks, on a fake world
    groups        process groups under names that are the same on every rank
    load_once     build the kernels that a rank takes, in a process of its own
    loaded        the step that runs an artifact's code on this rank
    run_artifact  train from an artifact, and report
    run_once      tune the kernels that travel with an artifact
"""
