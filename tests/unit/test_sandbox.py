"""What foreign code tries is contained, and comes back as an observation."""

import asyncio
import contextlib
import os
import re
import textwrap
import threading
import time
from io import FileIO
from pathlib import Path

import psutil
import pytest

from megatron_sao.rollout import sandbox
from megatron_sao.rollout.sandbox import Limits, SandboxUnavailable, run_python

LIMITS = Limits(seconds=60.0, output_bytes=2000)  # for what ends by itself, on a machine however busy
PATIENCE = 60.0  # a run that passes its limit by as much has not been ended by it


async def contained(code, limits):
    """The run, once the code's process has given up what it must not have, that process, and what /proc says of it."""
    task = asyncio.create_task(run_python(code, limits))
    while not task.done():
        await asyncio.sleep(0.05)
        for child in psutil.Process().children():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                status = Path(f"/proc/{child.pid}/status").read_text()
                if "\nSeccomp:\t2" in status:
                    return task, child, status
    raise AssertionError(f"it was never seen: {task.result()}")


def jailed():
    """The processes of runs, of which none should be left."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # of an earlier test, and it has ended just now
            if "jail.py" in str(child.cmdline()):
                found.append(child)
    return found


def run(code, limits=LIMITS):
    started = time.monotonic()
    result = asyncio.run(run_python(code, limits))
    assert time.monotonic() - started < limits.seconds + PATIENCE
    assert not jailed()
    return result


def test_what_it_prints_comes_back():
    result = run("import math, threading\nprint(math.factorial(10))\nthreading.Thread(target=print, args='t').start()")
    assert (result.output, result.outcome) == ("3628800\nt\n", "ok")


def test_it_has_the_environments_packages():
    assert run("import sympy; print(sympy.factorint(91))").output == "{7: 1, 13: 1}\n"


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


# Statements on ``outside``, a file of this user's that it may read (as ``fd``): Landlock alone lets them pass.
ON_FILES = [
    "os.chmod(outside, 0o600)",
    "os.fchmod(fd, 0o600)",
    "os.chmod(outside, 0o600, dir_fd=0)",
    "call(452, 452, -100, outside.encode(), 0o600, 0)  # fchmodat2",
    "os.chown(outside, os.getuid(), -1)",
    "os.lchown(outside, os.getuid(), -1)",
    "os.fchown(fd, os.getuid(), -1)",
    "os.utime(outside, (1, 1))",
    "os.utime(fd)",
    "call(132, 88, outside.encode(), None, 0, 0)  # utime; utimensat",
    "call(235, 88, outside.encode(), None, 0, 0)  # utimes",
    "call(261, 88, -100, outside.encode(), None, 0)  # futimesat",
    "os.setxattr(outside, 'user.a', b'1')",
    "os.setxattr(fd, 'user.a', b'1')",
    "os.setxattr(outside, 'user.a', b'1', follow_symlinks=False)",
    "os.removexattr(outside, 'user.a')",
    "os.removexattr(fd, 'user.a')",
    "call(463, 463, -100, outside.encode(), 0, b'user.a', 0, 0)  # setxattrat",
    "fcntl.ioctl(fd, 0x40086602, bytes(8))  # FS_IOC_SETFLAGS, what chattr does",
    "fcntl.ioctl(fd, 0x401C5820, bytes(28))  # FS_IOC_FSSETXATTR",
    "fcntl.flock(fd, fcntl.LOCK_EX)",
    "fcntl.lockf(fd, fcntl.LOCK_SH)",
    "fcntl.fcntl(fd, 37, struct.pack('hhqqi', 0, 0, 0, 0, 0))  # F_OFD_SETLK",
    "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "fcntl.fcntl(os.open(os.path.dirname(outside), 0), fcntl.F_NOTIFY, 1)",
    "os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)",
    "mmap.mmap(fd, 0, prot=mmap.PROT_READ).madvise(21)  # MADV_PAGEOUT",
    "os.truncate(outside, 0)",
    "os.open(outside, os.O_RDONLY | os.O_TRUNC)",
    "os.open('/etc/passwd', 3)",
    "os.mknod('disk', 0o60600, os.makedev(7, 0))",
    "os.mkdir('hidden', 0o300)",
    "call(95, 166, 0o777)  # umask",
    "os.posix_fallocate(os.open('a', os.O_CREAT | os.O_WRONLY), 0, 4096)",
]
ON_THE_PARENT = [
    "os.sched_setaffinity(parent, os.sched_getaffinity(parent))",
    "os.setpriority(os.PRIO_PROCESS, parent, 0)",
    "os.setpriority(os.PRIO_USER, os.getuid(), 0)",
    "call(142, 118, parent, struct.pack('i', 0))  # sched_setparam",
    "call(144, 119, parent, 0, struct.pack('i', 0))  # sched_setscheduler",
    "call(314, 274, parent, struct.pack('IIQiIQQQ', 48, 0, 0, 0, 0, 0, 0, 0), 0)  # sched_setattr",
    "call(251, 30, 1, parent, 2 << 13 | 4)  # ioprio_set",
    "resource.prlimit(parent, resource.RLIMIT_NOFILE)",
    "call(157, 167, 62, 1, parent, 0, 0)  # prctl(PR_SCHED_CORE)",
    "call(157, 167, 4, 1)  # prctl(PR_SET_DUMPABLE)",
    "call(109, 154, parent, 0)  # setpgid",
    "call(256, 238, parent, 0, None, None)  # migrate_pages",
    "call(279, 239, parent, 0, None, None, None, 0)  # move_pages",
    "call(274, 100, parent, bytes(8), bytes(8))  # get_robust_list",
    "call(312, 272, parent, parent, 0, 0, 1)  # kcmp",
    "call(101, 117, 0x4206, parent, 0, 0)  # ptrace",
    "call(310, 270, parent, None, 0, None, 0, 0)  # process_vm_readv",
    "call(311, 271, parent, None, 0, None, 0, 0)  # process_vm_writev",
    "os.pidfd_open(parent)",
    "call(438, 438, 0, 0, 0)  # pidfd_getfd",
    "call(424, 424, 0, 0, None, 0)  # pidfd_send_signal",
    "call(440, 440, 0, None, 0, 21, 0)  # process_madvise",
    "call(448, 448, 0, 0)  # process_mrelease",
    "os.kill(parent, 0)",
    "os.killpg(os.getpgid(parent), 0)",
    "call(200, 130, parent, 0)  # tkill",
    "call(234, 131, parent, parent, 0)  # tgkill",
    "call(129, 138, parent, 10, bytes(128))  # rt_sigqueueinfo",
    "call(297, 240, parent, parent, 10, bytes(128))  # rt_tgsigqueueinfo",
    "fcntl.fcntl(pipe, fcntl.F_SETOWN, parent)",
    "fcntl.fcntl(pipe, 15, struct.pack('ii', 1, parent))  # F_SETOWN_EX",
    "fcntl.fcntl(pipe, 10, signal.SIGUSR1)  # F_SETSIG",
    "fcntl.ioctl(pipe, 0x8901, struct.pack('i', parent))  # FIOSETOWN",
    "fcntl.ioctl(pipe, 0x8902, struct.pack('i', parent))  # SIOCSPGRP",
    "fcntl.ioctl(pipe, 0x5452, struct.pack('i', 1))  # FIOASYNC",
]
BEFORE = """
import ctypes, fcntl, mmap, os, resource, signal, struct
libc, parent, pipe = ctypes.CDLL(None, use_errno=True), os.getppid(), os.pipe()[0]

def call(x86_64, aarch64, *arguments):
    if libc.syscall(x86_64 if os.uname().machine == "x86_64" else aarch64, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

"""


@pytest.mark.parametrize("statement", ON_FILES + ON_THE_PARENT)
def test_neither_a_file_outside_nor_another_process_feels_it(statement, tmp_path, monkeypatch):
    outside = tmp_path / "site-packages" / "outside"
    outside.parent.mkdir()
    outside.write_text("x")
    monkeypatch.syspath_prepend(outside.parent)
    before = outside.stat().st_ctime_ns
    result = run(f"{BEFORE}outside = {str(outside)!r}\nfd = os.open(outside, os.O_RDONLY)\n{statement}")
    refusals = ("PermissionError: [Errno 1]", "OSError: [Errno 38]")  # not permitted; a call newer than the list
    assert result.output.splitlines()[-1].startswith(refusals)
    assert (outside.read_text(), outside.stat().st_ctime_ns) == ("x", before)


def test_root_too_has_no_capability_but_to_pass_over_modes():
    async def status():
        task, _, text = await contained("import time; time.sleep(60)", Limits(seconds=60))
        task.cancel()
        await asyncio.wait([task])
        return text

    held = re.findall(r"^Cap(?:Inh|Prm|Eff|Amb):\t(\w+)$", asyncio.run(status()), re.MULTILINE)
    assert len(held) == 4 and all(int(bits, 16) & ~0b110 == 0 for bits in held)


def test_copies_temporary_files_threads_and_alarms_work():
    code = """
        import mmap, pathlib, shutil, signal, tempfile, threading, time
        pathlib.Path("a/b").mkdir(parents=True)
        pathlib.Path("a/c").write_text("text")
        pathlib.Path("a/c").touch()
        for copy in (shutil.copy, shutil.copy2, shutil.copyfile):
            print(pathlib.Path(copy("a/c", copy.__name__)).read_text())
        shutil.move(shutil.copytree("a", "d"), "e")
        shutil.make_archive("f", "gztar", "e")
        shutil.unpack_archive("f.tar.gz", "g", filter="data")
        with tempfile.TemporaryDirectory(dir=".") as directory, tempfile.TemporaryFile(dir=directory) as file:
            file.write(pathlib.Path("g/c").read_bytes())
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 0) as memory:
                print(memory[:4])
        rung = []
        signal.signal(signal.SIGALRM, lambda *_: rung.append("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        threads = [threading.Thread(target=print, args=["thread"]) for _ in range(2)]
        for thread in threads:
            thread.start()
            thread.join()
        while not rung:
            time.sleep(0.01)
        print(*rung)
    """
    result = run(textwrap.dedent(code))
    assert (result.output.split(), result.outcome) == (["text"] * 3 + ["b'text'"] + ["thread"] * 2 + ["alarm"], "ok")


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
    monkeypatch.setattr(sandbox, "GRACE", PATIENCE)  # so that wall time does not
    result = run("while True: 0", Limits(seconds=1.0))
    assert (result.outcome, result.output) == ("timeout", "[stopped after 1 s]")


def test_ten_gigabytes_are_refused():
    assert run("x = bytearray(10 * 2**30)").output.splitlines()[-1] == "MemoryError"


def test_output_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(sandbox, "GRACE", PATIENCE)  # it ends by its CPU time: by wall time it might not have begun
    result = run("while True: print('x' * 1000)", Limits(seconds=1.0, output_bytes=2000))
    assert result.outcome == "timeout"
    assert len(result.output) < 2200 and "[output cut off after 2000 bytes]" in result.output


def test_files_without_end_are_refused_and_many_of_them_end_it():
    assert "File too large" in run("f = open('a', 'wb', 0)\nwhile True: f.write(bytes(2**20))").output
    many = "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'wb').write(bytes(2**20))"
    result = run(many, Limits(seconds=60.0, disk_bytes=2**24))
    assert (result.outcome, result.output) == ("killed", "[killed: more than 16777216 bytes of files]")


def test_a_tree_too_deep_to_look_through_ends_it_and_is_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = "import os, time\nfor _ in range(3000): os.mkdir('ab'); os.chdir('ab')\nopen('a', 'w')\ntime.sleep(1000)"
    result = run(deep, Limits(seconds=60.0))
    assert (result.outcome, result.output) == ("killed", "[killed: directories nested too deep]")
    assert not list(tmp_path.iterdir())


# Small stacks and one heap: else the limit of memory leaves room for some twenty.
THREADS = """
import ctypes, threading, time
ctypes.CDLL(None).mallopt(-8, 1)
threading.stack_size(32768)
for _ in range({}):
    threading.Thread(target=time.sleep, args=[{}]).start()
"""


def test_threads_up_to_the_limit_run_and_more_end_it_also_while_the_event_loop_is_busy(tmp_path):
    async def beside_a_busy_loop():
        waiting = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        task, process, _ = await contained(waiting + THREADS.format(64, 1000), LIMITS)
        (tmp_path / "go").touch()
        deadline = time.monotonic() + PATIENCE
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.01)  # the event loop, which would reap it, gets no turn
        assert process.status() == psutil.STATUS_ZOMBIE
        return await task

    assert run(THREADS.format(63, 0.5)).outcome == "ok"  # and the main thread
    for result in (run(THREADS.format(6000, 1000)), asyncio.run(beside_a_busy_loop())):
        assert (result.outcome, result.output) == ("killed", "[killed: more than 64 threads]")


def test_a_signal_without_a_name_is_an_end_like_others():
    code = """
        import ctypes, struct, time
        libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
        libc.timer_create(1, struct.pack("Pii48x", 0, 35, 0), ctypes.byref(timer))
        libc.timer_settime(timer, 0, struct.pack("4l", 0, 0, 0, 1000), None)
        time.sleep(60)
    """
    result = run(textwrap.dedent(code))
    assert (result.output, result.outcome) == ("[killed by signal 35]", "killed")


def test_secrets_of_the_worker_are_out_of_reach(monkeypatch):
    monkeypatch.setenv("MEGATRON_SAO_TOKEN", "the-secret")
    assert "the-secret" not in run("import os; print(dict(os.environ))").output
    assert "PermissionError" in run(f"print(open('/proc/{os.getpid()}/environ').read())").output


@pytest.fixture
def change_jail(monkeypatch, tmp_path):
    def change(before, after):
        (tmp_path / "jail.py").write_text(Path(sandbox.jail.__file__).read_text().replace(before, after))
        monkeypatch.setattr(sandbox.jail, "__file__", str(tmp_path / "jail.py"))

    return change


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("_syscall(444,", "_syscall(9999,", r"cannot contain foreign code on this machine: .*system call 9999"),
        ("abi = ", "abi = None + ", r"cannot contain foreign code on this machine: TypeError"),
        ("def main", "def main(", "SyntaxError"),
    ],
    ids=["layer-missing", "other-error", "not-started"],
)
def test_where_code_cannot_be_contained_it_is_not_run(before, after, message, change_jail):
    change_jail(before, after)
    for code in ("print('ran')", "print('ran')\n" + "#" * 2**20):  # the latter is more than a pipe holds
        with pytest.raises(SandboxUnavailable, match=message):
            run(code)


@pytest.mark.parametrize("end", ["sys.exit(97)", "os._exit(97)", "os._exit(1)"])
def test_no_end_of_the_code_passes_for_a_machine_that_cannot_contain_it(end):
    said = "the sandbox cannot contain foreign code on this machine"
    result = run(f"import os, sys\nprint({said!r}, flush=True)\n{end}")
    assert (result.output, result.outcome) == (f"{said}\n", "error")


def test_a_process_that_ended_before_its_threads_are_watched_is_told_as_any_other(change_jail, monkeypatch):
    def open_file(file):
        if isinstance(file, str):  # in /proc
            raise FileNotFoundError(file)
        return FileIO(file)

    change_jail("def main", "def main(")
    monkeypatch.setattr(sandbox, "FileIO", open_file)
    with pytest.raises(SandboxUnavailable, match="SyntaxError"):
        run("print('ran')")


def test_it_has_no_open_file_but_the_standard_three():
    code = """
        import os
        for number in range(64):
            try:
                os.fstat(number)
                print(number)
            except OSError:
                pass
    """
    assert run(textwrap.dedent(code)).output.split() == ["0", "1", "2"]


def test_a_machine_too_slow_to_contain_it_in_time_is_a_timeout(change_jail):
    change_jail("    _prctl(_PR_SET_DUMPABLE, 0)", "    import time; time.sleep(60)")
    assert run("print('ran')", Limits(seconds=0.5)).outcome == "timeout"


def test_a_cancelled_run_leaves_no_process_thread_or_open_file():
    async def cancel():
        task = asyncio.create_task(run_python("while True: pass", Limits(seconds=60)))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    before = psutil.Process().num_fds()
    asyncio.run(cancel())
    deadline = time.monotonic() + PATIENCE
    while any("_kill_above" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert psutil.Process().num_fds() <= before
    assert not jailed()
