"""From settings to a running engine: resolve, load, size, compile.

The one place that knows every part; the server and the offline API only see what it returns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pathlib
import platform
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve import models, tokenizer
from jaxserve.config import EngineConfig, SchedulerConfig, check_path, check_paths
from jaxserve.engine import memory
from jaxserve.engine.core import EngineCore
from jaxserve.engine.output import OutputStage
from jaxserve.engine.runner import Runner, RunnerShape
from jaxserve.engine.step import StepSpec
from jaxserve.models.sources import default_cache_dir
from jaxserve.obs import manifest
from jaxserve.pallas_kernels.linear import api as linear
from jaxserve.pallas_kernels.ragged_paged_attention import api as attention
from jaxserve.scheduler.scheduler import Scheduler

logger = logging.getLogger("jaxserve")

MAX_MODEL_LEN_DEFAULT = 8192


@dataclasses.dataclass(frozen=True)
class Engine:
    """A core that is ready to step, and what it was made of."""

    core: EngineCore
    tokenizer: tokenizer.Tokenizer
    config: EngineConfig  # with every None worked out
    model: models.LoadedModel
    memory_table: memory.MemoryTable
    description: str  # one line: what it runs with
    warm_up: Callable[[], None]  # compiles the programs; the first step needs them
    manifest: dict  # versions, content hashes, settings, hardware: see obs.manifest

    @staticmethod
    def trace(folder: pathlib.Path, seconds: float) -> None:
        """Profiles the devices for so long, on a thread of its own."""
        with jax.profiler.trace(str(folder)):
            time.sleep(seconds)

    @property
    def model_name(self) -> str:
        return self.config.served_model_name


def choose_backend(config: EngineConfig) -> models.Backend:
    """The backends of this machine's default device, or those the settings ask for."""
    device = jax.default_backend()
    kind = config.attention_backend
    kind = attention.choose_backend(device) if kind == "auto" else kind
    native = linear.choose_backend(device)
    # A TPU slices stacked weights inside the matmul, and the native matmul reads them in place;
    # XLA's for GPU and CPU would copy every layer in every step.
    return models.Backend(attention=kind, linear=native, stacked=device == "tpu" or native == "cpu")


def build(
    config: EngineConfig,
    scheduling: SchedulerConfig | None = None,
    *,
    clock: Callable[[], float],
    progress=None,
    cache_dir: pathlib.Path | None = None,
) -> Engine:
    """Loads the model and sizes the engine. progress: a jaxserve.progress.Progress.

    Compiling is left to Engine.warm_up, so that a server can answer its probes meanwhile. Raises
    ValueError, in one line with the remedy, for settings or files that will not do, and OSError for
    files that are not there or may not be written.
    """
    config.validate()
    check_paths(config)
    use_compile_cache(config, cache_dir)
    backend = choose_backend(config)
    path = models.resolve(config.model, cache_dir=cache_dir, progress=_part(progress, "download"))
    text = tokenizer.load(path, override=config.tokenizer and pathlib.Path(config.tokenizer))
    if config.chat_template is not None:
        text = text.with_chat_template(pathlib.Path(config.chat_template).read_text())
    loaded = models.load(
        config.model,
        weight_dtype=config.weight_dtype,
        dtype=config.dtype,
        backend=backend,
        progress=_part(progress, "load"),
        cache_dir=cache_dir,
    )
    config = _settle(config, loaded)
    device = jax.local_devices()[0]
    spec = loaded.config.kv_spec(config.page_size, jnp.dtype(config.kv_dtype))
    page_bytes = attention.kv_bytes_per_page(spec, backend.attention)
    free = memory.free_bytes(device)
    pages = memory.count_pages(config, page_bytes, free, device.platform)
    config = dataclasses.replace(config, num_pages=pages)

    num_tokens = min(loaded.config.vocab_size, text.vocab_size)
    scheduler = Scheduler.from_config(
        config,
        scheduling,
        eos_ids=loaded.eos_ids,
        vocab_size=num_tokens,
        page_bytes=page_bytes,
    )
    shape = RunnerShape(
        num_slots=config.num_slots,
        token_budget=config.token_budget,
        max_model_len=config.max_model_len,
        num_pages=pages,
        kv_spec=spec,
        deterministic=config.deterministic,
        host_pages=scheduler.limits.host_pages,
    )
    step = StepSpec(loaded.family, loaded.config, backend.attention, num_tokens)
    runner = Runner(step, loaded.params, shape, loaded.eos_ids)
    made_of = manifest.manifest(
        config,
        scheduler.config,
        model=loaded.name,
        weights={
            "sha256_of_samples": loaded.fingerprint,
            "dtype": loaded.weight_dtype,
            "bytes": loaded.weight_bytes,
        },
        tokenizer=text.fingerprint(),
        devices={
            "platform": device.platform,
            "device": device.device_kind,
            "devices": jax.device_count(),
        },
    )
    if config.decision_log is not None:
        from jaxserve.obs.decision_log import RecordingScheduler  # few runs want it, and its parts

        scheduler = RecordingScheduler(scheduler, pathlib.Path(config.decision_log), made_of)
    output = OutputStage(text, loaded.config.vocab_size)
    core = EngineCore(scheduler, runner, output, clock, pipelined=config.pipelined)
    table = memory.MemoryTable(loaded.weight_bytes, pages * page_bytes, memory.free_bytes(device))
    return Engine(
        core=core,
        tokenizer=text,
        config=config,
        model=loaded,
        memory_table=table,
        description=_describe(config, loaded, backend, device),
        warm_up=lambda: runner.compile(_part(progress, "compile")),
        manifest=made_of,
    )


def _part(progress, name):
    return None if progress is None else progress.part(name)


def _settle(config: EngineConfig, loaded) -> EngineConfig:
    """Replaces the Nones and autos that the model decides."""
    longest = loaded.config.max_position_embeddings
    length = config.max_model_len or min(longest, MAX_MODEL_LEN_DEFAULT)
    if length > longest:
        raise ValueError(f"--max_model_len={length}: this model's positions end at {longest}")
    dtype = loaded.config.dtype
    return dataclasses.replace(
        config,
        max_model_len=length,
        dtype=config.dtype if loaded.config.backend.int8_inputs else dtype,
        kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
        weight_dtype=loaded.weight_dtype,
        served_model_name=config.served_model_name or loaded.name,
    )


def _describe(config, loaded, backend, device) -> str:
    return (
        f"{config.served_model_name} on {device.device_kind} ({backend.attention} attention, "
        f"{backend.linear} matmul) · weights {loaded.weight_dtype} · activations {config.dtype} · "
        f"KV {config.kv_dtype} · {config.num_slots} slots · {config.num_pages} pages of "
        f"{config.page_size} tokens · {config.token_budget} tokens a step"
    )


def use_compile_cache(config: EngineConfig, cache_dir: pathlib.Path | None) -> None:
    """Keeps compiled programs between starts. jax ignores entries it cannot read or that belong
    to other versions; a folder for each kind of machine keeps foreign instructions out. Raises
    OSError for a folder of the settings that cannot be written; the user's need not be."""
    if config.compile_cache == "off":
        return
    base = config.compile_cache or (cache_dir or default_cache_dir()) / "programs"
    folder = str(pathlib.Path(base) / _machine_id())
    try:
        check_path(folder, "folder")
    except OSError as error:
        if config.compile_cache is not None:
            raise
        logger.warning("the next start compiles again: programs cannot be kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_raise_persistent_cache_errors", False)


def _machine_id() -> str:
    """Names the instruction set that CPU programs are compiled for."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:16]
