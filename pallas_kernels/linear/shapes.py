"""The matrices that benches run: those of the small models jaxserve is measured with."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """A weight [features, depth] of one model."""

    model: str
    name: str
    features: int
    depth: int


FORMS = ("float32", "bfloat16", "int8", "Q4_1")
ROWS = (1, 4, 16, 64, 256)
SHAPES = (
    LinearShape("smollm2", "gate", 1536, 576),
    LinearShape("smollm2", "down", 576, 1536),
    LinearShape("smollm2", "head", 49152, 576),
    LinearShape("qwen2.5", "gate", 4864, 896),
    LinearShape("qwen2.5", "down", 896, 4864),
    LinearShape("qwen2.5", "head", 151936, 896),
    LinearShape("gemma3", "gate", 2048, 640),
    LinearShape("gemma3", "head", 262144, 640),
)
