"""Model families, one file each, named as the checkpoint's model_type, and the loaders.

    model = models.load("demo", backend=Backend())      # or a .gguf file, a folder, a hub id
    hidden_TD, kv_pages = model.family.forward(model.params, model.config, ...)

Names are imported when they are used: the tokenizer reads GGUF files through this package and must
not load jax for it.
"""

import importlib

_HOMES = {
    "Backend": "config",
    "LoadedModel": "loaders.checkpoint",
    "ModelConfig": "config",
    "load": "loaders.checkpoint",
    "resolve": "sources",
}
__all__ = sorted(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
