"""The one configuration that every process reads, and where its values come from.

Precedence, the last wins: defaults, file (TOML), environment (``RANKBUS_<KEY>``), flags (``--<key>``).
"""

import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bus.messages import MOST_STANDING_STEPS

IPC_PATH_MAX = 107
"""Longest path of a Unix socket, in bytes (sun_path, less the final zero)."""

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]

JOURNALED = ("frontend", "rank", "executor")
"""The roles that can keep a journal."""

_ADDRESS = r"[A-Za-z0-9.-]+:[0-9]{1,5}"

EX_CONFIG = 78
"""Exit code of a process whose configuration or model cannot be used: a restart would not help (sysexits.h)."""


class ConfigError(Exception):
    """A value that cannot be used; the message names the key, the value, and what is allowed."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, flat. Lengths are in tokens, times in the unit their name ends with."""

    # What is served
    model: str = "embedded"
    """``embedded``, an HF-style folder, or a .gguf file."""
    served_model_name: str = ""
    """Name in the API; empty is the last part of the model's path."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and KV cache; auto is float32 on CPU, bfloat16 on TPU."""
    quantization: Literal["none", "int8"] = "none"
    """int8 keeps matrices in 8 bits, with a scale for each output: on a TPU half the memory, and half of what a step
    reads. On a CPU it makes steps slower."""
    max_model_len: Positive | None = None
    """Longest prompt plus output; none is what the model allows."""

    # Who runs
    ranks: Annotated[int, Meta(ge=1, le=1024)] = 2
    frontends: Annotated[int, Meta(ge=1, le=64)] = 1
    scheduler: Literal["native", "vllm"] = "native"
    policy: Literal["fcfs", "priority"] = "priority"
    """Who runs first: who came first, or by the requests' priority, then arrival time."""
    tensor_parallel: Positive = 1
    """Devices that share each weight, and with it a rank's work."""
    data_shards: Positive | None = None
    """Groups of tensor_parallel devices, over which the ranks are spread; none is as many as there are devices and
    ranks for."""
    executors: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Processes of the executor, one on each host with devices; they run each step together, on one mesh."""
    coordinator: str = "127.0.0.1:8476"
    """host:port of executor 0, where the executor's processes find each other."""
    follower_address: str = ""
    """tcp://host:port of executor 0, where it tells the others each step; empty is a socket in run_dir, for processes
    on one machine."""
    curve_key_file: str = ""
    """File with the engine's secret CURVE key (40 characters), which tcp addresses need; the same on all hosts."""

    # Limits, per rank
    max_num_seqs: Annotated[int, Meta(ge=1, le=8192)] = 32
    max_num_batched_tokens: Positive = 512
    long_prefill_token_threshold: Natural = 0
    """Longest prefill chunk of one request in one step; 0 is no limit but max_num_batched_tokens."""
    block_size: Literal[8, 16, 32, 64, 128] = 16
    num_blocks: Positive | None = None
    """KV blocks of all ranks together; none derives it from kv_memory_fraction."""
    kv_memory_fraction: Fraction | None = None
    """Part of the memory that the KV pool takes, at most what max_num_seqs can use: on a TPU of what is free after
    loading, on a CPU of all there is, so that each start has a pool of the same size and compiles nothing again. None
    is 0.9 on a TPU and 0.1 on a CPU."""
    enable_prefix_caching: bool = True
    async_depth: Annotated[int, Meta(ge=1, le=2)] = 2
    """Steps a rank may have in flight."""
    standing_steps: Annotated[int, Meta(ge=0, le=MOST_STANDING_STEPS)] = 32
    """Steps of steady decode that a rank says ahead, so that the executor goes from one to the next by itself. 0 has
    each step wait for its schedule."""
    pin_threads: bool = True
    """Each process handles its messages on one CPU, another for each process as far as there are others."""
    model_on_cpu: bool | None = None
    """Whether the model computes on the CPUs that handle messages; none is: where there is no TPU or GPU."""
    log_stats: bool = True
    single_step: bool = False
    """Ranks schedule only on command (debugging and tests)."""

    # Speculation (native scheduler)
    speculation: Literal["off", "ngram", "model"] = "off"
    """Where draft tokens come from: nowhere; from what follows the last tokens where they stood before (ngram); from
    the draft_model."""
    draft_model: str = ""
    """An HF-style folder with a smaller model of the same vocabulary."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 7
    """Most drafts of a request in a step."""
    prompt_lookup_min: Positive = 2
    """How many last tokens must stand elsewhere in a request for what follows there to be tried."""
    prompt_lookup_max: Positive = 7
    """So many are looked at: where more of them agree is preferred, and where fewer do, no more drafts are tried than
    that."""

    # LoRA adapters
    max_loras: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Adapters that may be loaded at once; all of them may be in one step. 0 is none, and costs nothing."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Largest rank of an adapter; each takes memory for so much."""
    lora_modules: str = ""
    """Adapters that are loaded at start: NAME=FOLDER, with commas between."""

    # Chat (HTTP)
    tool_call_parser: str = ""
    """Which of vLLM's parsers finds tool calls in answers, as its option of this name; with one, the model may choose
    whether to call a tool (tool_choice auto). Empty is none."""
    reasoning_parser: str = ""
    """Which of vLLM's parsers tells reasoning from answers, as its option of this name; empty is none."""

    # Embeddings
    pooling: Literal["last", "mean"] = "last"
    """What the embedding of a prompt is: the hidden state of its last token, or the mean of all. On the client bus a
    request may say otherwise."""

    # Routing and batching
    routing: Literal["least_loaded", "round_robin"] = "least_loaded"
    batching_window_ms: Annotated[float, Meta(ge=0)] = 10.0
    """How long the executor waits for ranks that said more is coming. To go without one costs all of them a step more,
    5 to 15 ms of a TPU."""

    # Where things are
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    """HTTP port of frontend 0; frontend i listens on port + i."""
    allowed_origins: str = ""
    """Origins of web pages, with commas between, that may open sessions by WebSocket; pages of the server itself always
    may, * is all."""
    run_dir: str = "run"
    """Sockets, logs and supervisord's files; made with mode 0700."""
    cache_dir: str = "~/.cache/rankbus"
    """Prepared models and compiled programs."""

    # The bus
    heartbeat_interval_s: Seconds = 1.0
    heartbeat_timeout_s: Seconds = 15.0
    command_deadline_s: Seconds = 30.0
    max_message_bytes: Annotated[int, Meta(ge=1024)] = 64 * 1024 * 1024
    session_idle_s: Seconds = 300.0
    """How long a session whose client was lost is kept for that client to come back."""

    # Logs
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    # Traces
    otlp_traces_endpoint: str = ""
    """Where traces of requests go, as vLLM's setting of this name (OpenTelemetry); empty is nowhere."""

    # The journal
    journal: str = "off"
    """Which processes keep one: off, on (all), or roles (frontend, rank, executor) with commas between."""
    journal_dir: str = ""
    """Where its files go; empty is the folder journal in run_dir."""
    journal_file_mb: Annotated[int, Meta(ge=1, le=65536)] = 64
    """Size at which a process goes on to its next file."""
    journal_file_minutes: Positive = 60
    """Age at which a process goes on to its next file."""
    journal_keep: Positive = 16
    """Files kept of one process; the oldest go first."""
    journal_redact: bool = False
    """Write numbers that stand for token ids instead of them, and no text."""

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir).expanduser().absolute()

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser().absolute()

    @property
    def journal_path(self) -> Path:
        return Path(self.journal_dir).expanduser().absolute() if self.journal_dir else self.run_path / "journal"

    @property
    def first_adapters(self) -> dict[str, str]:
        """The folders of the adapters in `lora_modules`, by name."""
        pairs = [item.partition("=") for item in self.lora_modules.split(",") if item.strip()]
        return {name.strip(): path.strip() for name, _, path in pairs}

    @property
    def most_drafts(self) -> int:
        """Most draft tokens of a request in a step; 0 without speculation."""
        return 0 if self.speculation == "off" else self.num_speculative_tokens

    @property
    def most_prompt_logprobs(self) -> int:
        """Most likely tokens that may be asked for of each of a prompt's tokens.

        A step of `max_num_batched_tokens` with so many fills half a message: 8 bytes each, and as many for the token
        that stands there.
        """
        return self.max_message_bytes // (16 * self.max_num_batched_tokens) - 1

    def journals(self, role: str) -> bool:
        """Whether processes of this role keep a journal."""
        return self.journal == "on" or role in self.journal.split(",")

    def client_endpoint(self, frontend: int) -> str:
        return self._ipc(f"client-{frontend}")

    def command_endpoint(self, frontend: int) -> str:
        return self._ipc(f"command-{frontend}")

    def step_endpoint(self) -> str:
        return self._ipc("step")

    def follower_endpoint(self) -> str:
        return self.follower_address or self._ipc("follower")

    @property
    def local_executors(self) -> int:
        """How many of the executor's processes run on the machine of the ranks: all, unless they meet over tcp."""
        return 1 if self.follower_address else self.executors

    def _ipc(self, name: str) -> str:
        path = self.run_path / f"{name}.ipc"
        size = len(os.fsencode(path))
        if size > IPC_PATH_MAX:
            raise ConfigError(
                f"run_dir: the socket path {path} has {size} bytes, an ipc path may have {IPC_PATH_MAX}; "
                "choose a shorter run_dir"
            )
        return f"ipc://{path}"


def load(
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
    file: str | os.PathLike[str] | None = None,
) -> Config:
    """Read the configuration from `file` (or the one RANKBUS_CONFIG names), `environ` and `flags`.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, or a value that is not allowed.
    """
    values: dict[str, Any] = {}
    file = file or environ.get("RANKBUS_CONFIG")
    if file:
        values.update(_read_file(Path(file)))
    known = {field.name: field for field in msgspec.structs.fields(Config)}
    for key, text in environ.items():
        name = key.removeprefix("RANKBUS_").lower()
        if key.startswith("RANKBUS_") and name in known:
            values[name] = _parse(name, text, known[name].type)
    for name, text in (flags or {}).items():
        if name not in known:
            raise ConfigError(f"--{name.replace('_', '-')} is not a setting; `rankbus config` lists them")
        values[name] = _parse(name, text, known[name].type)
    config = Config(**{name: _convert(name, value, known) for name, value in values.items()})
    config.step_endpoint()  # refuses a run_dir that is too long now, not in one of the processes
    config.client_endpoint(config.frontends - 1)
    config.command_endpoint(config.frontends - 1)
    _check_hosts(config)
    if config.journal not in ("off", "on") and not set(config.journal.split(",")) <= set(JOURNALED):
        raise ConfigError(
            f"journal: {config.journal!r} is not allowed; it must be off, on, or some of {', '.join(JOURNALED)} "
            "with commas between"
        )
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"prompt_lookup_min: {config.prompt_lookup_min} is not allowed; it must be at most prompt_lookup_max, "
            f"{config.prompt_lookup_max}"
        )
    if (config.speculation == "model") != bool(config.draft_model):
        raise ConfigError(
            f"draft_model: {config.draft_model!r} is not allowed with speculation {config.speculation}; "
            + ("it must be a folder" if config.speculation == "model" else "it must be empty")
        )
    if config.speculation != "off" and config.scheduler != "native":
        raise ConfigError(f"speculation: {config.speculation!r} is not allowed with scheduler vllm; it must be 'off'")
    _check_adapters(config)
    if config.otlp_traces_endpoint and not config.log_stats:
        raise ConfigError("otlp_traces_endpoint: traces are made of statistics, so log_stats must be true")
    if config.port + config.frontends - 1 > 65535:
        raise ConfigError(f"port: {config.port} + {config.frontends} frontends goes past 65535")
    return config


def _check_adapters(config: Config) -> None:
    """Refuse adapters for the start that cannot be loaded."""
    first = config.first_adapters
    items = [item for item in config.lora_modules.split(",") if item.strip()]
    if not all(name and path for name, path in first.items()) or len(first) < len(items):
        raise ConfigError(
            f"lora_modules: {config.lora_modules!r} is not allowed; it must be NAME=FOLDER, with commas between, and "
            "no name twice"
        )
    if len(first) > config.max_loras:
        raise ConfigError(f"lora_modules: {len(first)} adapters are not allowed; max_loras is {config.max_loras}")


def _check_hosts(config: Config) -> None:
    """Refuse addresses for several hosts that cannot be used."""
    if not re.fullmatch(_ADDRESS, config.coordinator):
        raise ConfigError(f"coordinator: {config.coordinator!r} is not allowed; it must be host:port")
    if config.follower_address and not re.fullmatch(f"tcp://{_ADDRESS}", config.follower_address):
        raise ConfigError(f"follower_address: {config.follower_address!r} is not allowed; it must be tcp://host:port")
    if config.follower_address and not config.curve_key_file:
        raise ConfigError(f"follower_address: {config.follower_address} needs keys; set curve_key_file")


def origins(
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
    file: str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """For each setting, where `load` takes its value from: ``default``, the file, the variable, or the flag."""
    file = file or environ.get("RANKBUS_CONFIG")
    in_file = _read_file(Path(file)) if file else {}
    found: dict[str, str] = {}
    for field in msgspec.structs.fields(Config):
        name = field.name
        if name in (flags or {}):
            found[name] = f"--{name.replace('_', '-')}"
        elif (variable := f"RANKBUS_{name.upper()}") in environ:
            found[name] = variable
        else:
            found[name] = str(file) if name in in_file else "default"
    return found


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Take the `--key value` and `--key=value` pairs that are settings out of `arguments`; return them and the rest."""
    known = {field.name for field in msgspec.structs.fields(Config)}
    flags: dict[str, str] = {}
    rest: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--") or name not in known:
            rest.append(argument)
        elif equals:
            flags[name] = value
        elif remaining:
            flags[name] = remaining.pop(0)
        else:
            raise ConfigError(f"{argument} needs a value")
    return flags, rest


def to_toml(config: Config) -> str:
    """The configuration as a TOML file that `load` reads back to the same values."""
    values = {f.name: getattr(config, f.name) for f in msgspec.structs.fields(Config)}
    lines = [f"{name} = {_toml(value)}" for name, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: str | bool | float) -> str:
    return msgspec.json.encode(value).decode()  # JSON's strings, numbers and booleans are TOML's as well


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config file {path} is not TOML: {error}") from None


def _parse(name: str, text: str, kind: Any) -> Any:
    """A value from the environment or a flag: text as it is for text settings, otherwise read as TOML would."""
    if _is_text(kind):
        return text
    if text.lower() in ("none", ""):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _is_text(kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in typing.get_args(kind))
    return kind is str


def _convert(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(f"{name} is not a setting; `rankbus config` lists them")
    try:
        return msgspec.convert(value, known[name].type)
    except msgspec.ValidationError:
        raise ConfigError(f"{name}: {value!r} is not allowed; it must be {_allowed(known[name].type)}") from None


def _allowed(kind: Any) -> str:
    """What a type allows, in words."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    if origin in (types.UnionType, typing.Union):
        return " or ".join("none" if arm is type(None) else _allowed(arm) for arm in typing.get_args(kind))
    if origin is Annotated or hasattr(kind, "__metadata__"):
        base, *metas = typing.get_args(kind)
        bounds = [
            f"{words} {getattr(meta, bound):g}"
            for meta in metas
            for bound, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
            if getattr(meta, bound, None) is not None
        ]
        return f"{_allowed(base)} of {' and '.join(bounds)}"
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[kind]
