"""chunked_loss: the output layer and its loss in pieces of the tokens, so that whole logits never exist.

A recipe has `model.loss = "workbench.lab.chunked_loss.loss:in_pieces:8"`, a module of your own calls what is in

    loss  the module, the function, and its gradients
"""
