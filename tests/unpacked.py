"""The data of a view, read back as its page does."""

import base64
import json
import zlib


def unpacked(text):
    """The data behind `workbench.notebook.views.controls.packed`."""
    return json.loads(zlib.decompress(base64.b64decode(text)))
