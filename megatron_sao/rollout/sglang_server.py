"""``python -m megatron_sao.rollout.sglang_server FLAGS``: SGLang's server, its keys taken from the environment.

Every user of a machine can read the command lines on it, so MEGATRON_SAO_TOKEN stays out of them.
"""

import os
import sys
import traceback

from megatron_sao.launch.process import die_with_parent


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    token = os.environ["MEGATRON_SAO_TOKEN"]
    load_plugins()
    code = 0
    try:
        run_server(prepare_server_args([*sys.argv[1:], "--api-key", token, "--admin-api-key", token]))
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
