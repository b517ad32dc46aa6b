"""``rankbus config``: the configuration as a TOML file, with where each value comes from as a comment."""

import msgspec

from bus import config as configuration
from bus.config import Config, ConfigError


def main(arguments: list[str]) -> int:
    """Print the configuration that `serve` would run with, given the same flags."""
    flags, rest = configuration.split_flags(arguments)
    if rest:
        raise ConfigError(f"{rest[0]} is not a setting; `rankbus config` lists them")
    print(render(configuration.load(flags), configuration.origins(flags)))
    return 0


def render(config: Config, origins: dict[str, str]) -> str:
    """One line per setting; a setting that is none is a comment, since TOML has no none."""
    lines = {line.partition(" =")[0]: line for line in configuration.to_toml(config).splitlines()}
    names = [field.name for field in msgspec.structs.fields(Config)]
    texts = [lines.get(name, f"# {name} = none") for name in names]
    width = max(map(len, texts))
    return "\n".join(f"{text:{width}}  # {origins[name]}" for name, text in zip(names, texts, strict=True))
