"""Ask the engine from a script, with the client library: python examples/generate.py [ENDPOINT]"""

import sys
from pathlib import Path

from frontend.client import Client

endpoint = sys.argv[1] if len(sys.argv) > 1 else f"ipc://{Path('run').absolute()}/client-0.ipc"

with Client(endpoint) as client:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    for piece in client.generate(question, temperature=0.0, max_tokens=30):
        print(piece.text, end="", flush=True)
    print()
