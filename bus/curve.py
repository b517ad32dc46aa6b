"""Keys for buses over tcp: CURVE encrypts what passes, and lets in only who has the engine's key.

One secret key, the same in a file on every host, is all that there is. The public key that belongs to it is told to
nobody, and without it no handshake with the binding side can be begun; so both ends hold the same pair.
"""

import ipaddress
from pathlib import Path

import zmq

from bus.config import Config, ConfigError


def is_needed(endpoint: str) -> bool:
    """Whether an endpoint can be reached from other machines, and so needs keys."""
    return endpoint.startswith("tcp://")


def guard_binding(socket: "zmq.Socket[bytes]", config: Config) -> None:
    """Let only those connect to a socket who have the key; before it is bound.

    Raises:
        ConfigError: the key cannot be had.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, _secret(config))


def guard_connecting(socket: "zmq.Socket[bytes]", config: Config) -> None:
    """Have a socket show the key to the other side, and talk only to one that has it; before it is connected.

    Raises:
        ConfigError: the key cannot be had.
    """
    secret = _secret(config)
    public = zmq.curve_public(secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def binding(endpoint: str) -> str:
    """What to bind, for others to connect to `endpoint`: a socket cannot be bound to a name, but to every address."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return f"tcp://*:{port}"
    return endpoint


def _secret(config: Config) -> bytes:
    if not config.curve_key_file:
        raise ConfigError("curve_key_file: there is none; buses over tcp need it")
    path = Path(config.curve_key_file).expanduser()
    try:
        secret = path.read_text().strip().encode()
        zmq.curve_public(secret)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"curve_key_file: {path} cannot be read: {error}") from None
    except (ValueError, zmq.ZMQError):
        raise ConfigError(f"curve_key_file: {path} holds no secret CURVE key, which is 40 characters (Z85)") from None
    return secret
