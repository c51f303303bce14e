"""Weights of Hugging Face and checkpoints of training, read and written by torch.distributed.checkpoint.

    checkpoints   save and resume a training run
    hugging_face  names, orders of rows and sizes as transformers has them, and `plan_of` its models
    read          `model.weights`: each rank reads its parts of a folder of safetensors
    write         `save_weights`: a folder that transformers reads
"""

from workbench.recipe.hooks import declare_hook

declare_hook("weights.read", "workbench.lab.weights.read:stored_weights")
declare_hook("weights.save", "workbench.lab.weights.write:save_weights")
declare_hook("weights.check_saving", "workbench.lab.weights.checkpoints:check_saving")
declare_hook("weights.checkpoints", "workbench.lab.weights.checkpoints:Checkpoints")
