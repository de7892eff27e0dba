"""What foreign code tries is contained, and comes back as an observation."""

import asyncio
import os
import time
from pathlib import Path

import psutil
import pytest

from megatron_sao.rollout import sandbox
from megatron_sao.rollout.sandbox import Limits, SandboxUnavailable, run_python

LIMITS = Limits(seconds=3.0, output_bytes=2000)


def run(code, limits=LIMITS):
    started = time.monotonic()
    result = asyncio.run(run_python(code, limits))
    assert time.monotonic() - started < limits.seconds + 10
    assert not [child for child in psutil.Process().children(recursive=True) if "jail.py" in str(child.cmdline())]
    return result


def test_what_it_prints_comes_back():
    result = run("import math, threading\nprint(math.factorial(10))\nthreading.Thread(target=print, args='t').start()")
    assert (result.output, result.outcome) == ("3628800\nt\n", "ok")


def test_it_has_the_environments_packages():
    assert run("import sympy; print(sympy.factorint(91))", Limits(seconds=30)).output == "{7: 1, 13: 1}\n"


def test_an_error_is_shown_without_our_own_frames():
    result = run("def f():\n    return 1 / 0\nf()")
    assert result.outcome == "error"
    assert result.output.splitlines()[-1] == "ZeroDivisionError: division by zero" and "jail" not in result.output
    assert "SyntaxError" in run("x = = 3").output
    assert run("raise SystemExit(3)").outcome == "error"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['/bin/ls'])",
        "import os; os.execv('/bin/ls', ['ls'])",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import socket; socket.socket()",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes, os; ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and exec('raise PermissionError')",
        "open('/etc/passwd').read()",
        "import os; os.listdir('/')",
        "import os; os.listdir('/proc')",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    ],
)
def test_what_it_may_not_do_is_refused_and_said(code):
    result = run(code)
    assert result.outcome == "error"
    assert result.output.splitlines()[-1].startswith(("PermissionError", "ValueError: not allowed to raise maximum"))


def test_a_write_outside_its_directory_is_refused_and_inside_it_is_gone_afterwards(tmp_path):
    outside = tmp_path / "outside"
    for target in (outside, Path.home() / "evil", Path("/tmp/evil-of-the-sandbox")):
        assert "PermissionError" in run(f"open({str(target)!r}, 'w').write('x')").output
        assert not target.exists()
    result = run("open('a', 'w').write('x'); import os; print(os.getcwd(), os.listdir())")
    directory, listing = result.output.split(maxsplit=1)
    assert listing == "['a']\n" and not Path(directory).exists()


def test_an_endless_loop_ends_at_the_limit_also_if_it_ignores_signals():
    deaf = "for n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)"
    for code in ("while True: 0", "import time; time.sleep(1000)", f"import signal\n{deaf}\nwhile True: 0"):
        result = run(code, Limits(seconds=1.0))
        assert (result.outcome, result.output) == ("timeout", "[stopped after 1 s]")


def test_cpu_time_ends_it_at_the_limit_too(monkeypatch):
    monkeypatch.setattr(sandbox, "GRACE", 5.0)
    result = run("while True: 0", Limits(seconds=1.0))
    assert (result.outcome, result.output) == ("timeout", "[stopped after 1 s]")


def test_ten_gigabytes_are_refused():
    assert run("x = bytearray(10 * 2**30)").output.splitlines()[-1] == "MemoryError"


def test_output_without_end_is_cut_off():
    result = run("while True: print('x' * 1000)", Limits(seconds=1.0, output_bytes=2000))
    assert result.outcome == "timeout"
    assert len(result.output) < 2200 and "[output cut off after 2000 bytes]" in result.output


def test_files_without_end_are_refused_and_many_of_them_end_it():
    assert "File too large" in run("f = open('a', 'wb', 0)\nwhile True: f.write(bytes(2**20))").output
    many = "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'wb').write(bytes(2**20))"
    assert run(many, Limits(seconds=20.0, disk_bytes=2**24)).outcome == "killed"


def test_secrets_of_the_worker_are_out_of_reach(monkeypatch):
    monkeypatch.setenv("MEGATRON_SAO_TOKEN", "the-secret")
    assert "the-secret" not in run("import os; print(dict(os.environ))").output
    assert "PermissionError" in run(f"print(open('/proc/{os.getpid()}/environ').read())").output


def test_where_code_cannot_be_contained_it_is_not_run(monkeypatch, tmp_path):
    jail = Path(sandbox.jail.__file__).read_text().replace("_syscall(444,", "_syscall(9999,")
    (tmp_path / "jail.py").write_text(jail)
    monkeypatch.setattr(sandbox.jail, "__file__", str(tmp_path / "jail.py"))
    with pytest.raises(SandboxUnavailable, match=r"cannot contain foreign code on this machine: .*system call 9999"):
        run("print('ran')")


def test_a_cancelled_run_leaves_no_process():
    async def cancel():
        task = asyncio.create_task(run_python("while True: pass", Limits(seconds=60)))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(cancel())
    assert not [child for child in psutil.Process().children(recursive=True) if "jail.py" in str(child.cmdline())]
