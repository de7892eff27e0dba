"""``python -I -S -B jail.py SECONDS MEMORY FILE_SIZE [IMPORT_PATH…] < code``: gives up all that the code must not have,
then runs it. In a process of its own; imports the standard library alone.

Three layers, none of which needs privileges or a container:

* rlimits bound CPU time, memory, file size and open files, and forbid core dumps;
* Landlock lets it read what Python needs and write in its working directory, and nowhere else;
* seccomp refuses new processes and programs, sockets, signals to others, tracing, mounting and namespaces.
"""

import ctypes
import os
import platform
import resource
import struct
import sys
import traceback

UNAVAILABLE = 97  # exit code: this machine lacks a layer, and the code was not run

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_DUMPABLE = 38, 22, 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

# System calls that are refused, by architecture. fork and vfork do not exist on arm64.
_REFUSED = {
    "x86_64": {
        "audit": 0xC000003E,
        "clone": 56,
        "clone3": 435,
        "refused": [
            57, 58, 59, 322,  # fork, vfork, execve, execveat
            41, 42, 43, 44, 46, 49, 50, 53, 288, 307,  # socket, connect, accept, send…, bind, listen, socketpair, …
            62, 200, 234, 424,  # kill, tkill, tgkill, pidfd_send_signal
            101, 310, 311, 438,  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
            155, 161, 165, 166, 272, 308, 428, 429, 430, 442,  # pivot_root, chroot, mount…, unshare, setns, …
            160, 302, 298, 321, 425, 426, 427, 248, 249, 250,  # setrlimit, prlimit64, perf, bpf, io_uring, keys
            29, 30, 68, 69, 240, 134, 319, 323,  # shared memory, message queues, uselib, memfd_create, userfaultfd
        ],
    },
    "aarch64": {
        "audit": 0xC00000B7,
        "clone": 220,
        "clone3": 435,
        "refused": [
            221, 281,
            198, 200, 201, 202, 203, 206, 211, 242, 199, 269,
            129, 130, 131, 424,
            117, 270, 271, 438,
            41, 51, 40, 39, 97, 268, 428, 429, 430, 442,
            164, 261, 241, 280, 425, 426, 427, 217, 218, 219,
            194, 196, 186, 187, 180, 279, 282,
        ],
    },
}  # fmt: skip
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_LANDLOCK_READ = 1 << 2 | 1 << 3 | 1 << 0  # read a file, list a directory, execute (map a library)
_LANDLOCK_ALL = (1 << 13) - 1  # every access of Landlock's first version
_LANDLOCK_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # file-system access rights by ABI


def main() -> None:
    seconds, memory, file_size = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    imports = sys.argv[4:]
    code = sys.stdin.buffer.read()
    try:
        _limit(seconds, memory, file_size)
        _confine_files(imports)
        _confine_calls()
    except OSError as error:
        print(f"the sandbox cannot contain foreign code on this machine: {error}", flush=True)
        os._exit(UNAVAILABLE)
    sys.argv[:] = ["script.py"]
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)] + imports
    try:
        exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # this file is not the code's
        traceback.print_exception(error)
        sys.exit(1)


def _limit(seconds: float, memory: int, file_size: int) -> None:
    cpu = int(seconds) + 1
    # SIGXCPU says why it ends. SIGKILL, for code that ignores it, comes later than the caller's: both at once is a race
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 2))
    for which, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (limit, limit))
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _confine_files(imports: list[str]) -> None:
    """Landlock: read Python's own directories, do everything in the working directory, nothing else."""
    abi = _syscall(444, None, 0, 1)
    rights = (1 << _LANDLOCK_BY_ABI.get(min(abi, 5), 13)) - 1
    attributes = struct.pack("<Q", rights)
    ruleset = _syscall(444, attributes, len(attributes), 0)
    readable = {sys.prefix, sys.base_prefix, *imports, "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib"}
    for path in (*sorted(readable), "/dev/urandom", "/dev/null", "/etc/ld.so.cache"):
        if os.path.exists(path):
            allowed = _LANDLOCK_READ if os.path.isdir(path) else 1 << 2
            _allow(ruleset, path, allowed)
    _allow(ruleset, os.getcwd(), rights & ~(1 << 0))
    _syscall(446, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("<Qi", rights, directory)
        _syscall(445, ruleset, 1, rule, 0)
    finally:
        os.close(directory)


def _confine_calls() -> None:
    """seccomp: refuse with EPERM what is on the list; threads may be started, processes not."""
    machine = platform.machine()
    if machine not in _REFUSED:
        raise OSError(f"no list of system calls for {machine}")
    calls = _REFUSED[machine]

    def load(offset: int) -> bytes:
        return struct.pack("<HBBI", 0x20, 0, 0, offset)

    def jump(test: int, value: int, yes: int, no: int) -> bytes:
        return struct.pack("<HBBI", 0x05 | test, yes, no, value)

    def answer(value: int) -> bytes:
        return struct.pack("<HBBI", 0x06, 0, 0, value)

    equal, any_bit = 0x10, 0x40
    program = [load(4), jump(equal, calls["audit"], 1, 0), answer(_KILL), load(0)]
    if machine == "x86_64":  # the x32 calls have numbers of their own
        program += [jump(0x30, 0x40000000, 0, 1), answer(_KILL)]
    for number in calls["refused"]:
        program += [jump(equal, number, 0, 1), answer(_ERRNO | _EPERM)]
    program += [jump(equal, calls["clone3"], 0, 1), answer(_ERRNO | _ENOSYS)]  # libc then calls clone
    program += [jump(equal, calls["clone"], 0, 3), load(16), jump(any_bit, _CLONE_THREAD, 1, 0)]
    program += [answer(_ERRNO | _EPERM), answer(_ALLOW)]
    code = ctypes.create_string_buffer(b"".join(program))
    filter = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(filter))


def _prctl(option: int, *values: object) -> None:
    arguments = [value if isinstance(value, ctypes.c_char_p) else ctypes.c_ulong(value) for value in values]
    arguments += [ctypes.c_ulong(0)] * (4 - len(arguments))
    if _libc.prctl(option, *arguments):
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def _syscall(number: int, *values: object) -> int:
    arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    main()
