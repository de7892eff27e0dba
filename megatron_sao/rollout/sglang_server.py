"""``python -m megatron_sao.rollout.sglang_server FLAGS``: SGLang's server, its keys taken from the environment.

Every user of a machine can read the command lines on it, so MEGATRON_SAO_TOKEN stays out of them.
"""

import os
import struct
import sys
import time
import traceback
from pathlib import Path

from megatron_sao.launch.process import die_with_parent

BEING_WRITTEN_SECONDS = 60.0  # a library younger than this may be one that another server is just compiling


def drop_torn_libraries(cache: Path) -> list[Path]:
    """Delete the compiled libraries under ``cache`` that a crash left incomplete; returns them. torch takes whatever
    lies there for compiled, so one of them would fail every start of every server from then on."""
    torn = [
        path
        for path in cache.rglob("*.so")
        if time.time() - path.stat().st_mtime > BEING_WRITTEN_SECONDS and not _is_whole_elf(path)
    ]
    for path in torn:
        path.unlink(missing_ok=True)
    return torn


def _is_whole_elf(path: Path) -> bool:
    """Whether the file is as long as its header says: the table of sections comes last."""
    with path.open("rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":  # of 64 bits
        return False
    (table,) = struct.unpack_from("<Q", header, 40)
    entry_size, entries = struct.unpack_from("<HH", header, 58)
    return bool(table) and size >= table + entry_size * entries


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.environ import third_party_cache_defaults
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    token = os.environ["MEGATRON_SAO_TOKEN"]
    cache = third_party_cache_defaults() | dict(os.environ)
    for path in drop_torn_libraries(Path(cache["TORCHINDUCTOR_CACHE_DIR"])):
        print(f"deleted {path}: a crash left it incomplete; it is compiled again", flush=True)
    load_plugins()
    code = 0
    try:
        # with "=", or a token that begins with "-" would be taken for a flag
        run_server(prepare_server_args([*sys.argv[1:], f"--api-key={token}", f"--admin-api-key={token}"]))
    except BaseException as error:
        code = 1
        if not isinstance(error, SystemExit):  # uvicorn's, which has said why
            traceback.print_exc()
    kill_process_tree(os.getpid(), include_parent=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # SGLang's warm-up thread would keep a server that failed to listen alive for minutes


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # The scheduler and detokenizer processes import this module first. SGLang ties them to their parent too, but
    # only after half a minute of imports; a server killed before that would leave them behind for ever.
    die_with_parent()
    # multiprocessing has given this process the server's arguments
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and "--enable-return-routed-experts" in sys.argv:
        # The routed experts' store is host memory that SGLang would pin for a GPU.
        from sglang.srt.mem_cache.pool_host import common

        common._cuda_host_register = lambda *_: None
