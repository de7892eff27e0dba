"""``python -I -S -B jail.py SECONDS MEMORY FILE_SIZE EVENTFD [IMPORT_PATH…] < code``: gives up all that the code must
not have, says so on the eventfd, then reads the code and runs it. In a process of its own; imports the standard library
alone.

Four layers, none of which needs privileges or a container:

* rlimits bound CPU time, memory, file size and open files, and forbid core dumps;
* capabilities are dropped, where it has any: root's reach devices, clocks and other people's files;
* Landlock lets it read what Python needs and write in its working directory, and nowhere else;
* seccomp allows what Python needs for its own files, memory and threads, and refuses every other system call.
"""

import ctypes
import os
import platform
import resource
import shutil
import struct
import sys
import traceback

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_DUMPABLE = 38, 22, 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_ALL_BITS = 0xFFFFFFFF
# System calls that are allowed, with their numbers on x86_64 and aarch64 (None: not there). What is not listed answers
# EPERM: Landlock does not see a change of mode, owner, times, attributes or locks, nor what reaches another process.
_ALLOWED = {
    # files that are open
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "lseek": (8, 62),
    "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "pipe": (22, None), "pipe2": (293, 59), "sendfile": (40, 71), "copy_file_range": (326, 285), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46),
    # files by name: what Landlock checks, and questions
    "stat": (4, None), "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291),
    "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "creat": (85, None), "link": (86, None), "linkat": (265, 37), "unlink": (87, None),
    "unlinkat": (263, 35), "symlink": (88, None), "symlinkat": (266, 36), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "rmdir": (84, None),
    # waiting
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19),
    # its own memory, threads and signals
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "msync": (26, 227),
    "brk": (12, 214), "futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96),
    "rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "exit": (60, 93), "exit_group": (231, 94), "restart_syscall": (219, 128), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "rt_sigpending": (127, 136), "sigaltstack": (131, 132), "pause": (34, None),
    # time
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103), "timer_create": (222, 107),
    "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_getoverrun": (225, 109),
    "timer_delete": (226, 111), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrusage": (98, 165),
    # who and where it is
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155),
    "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "uname": (63, 160), "sysinfo": (99, 179),
    "getrandom": (318, 278),
}  # fmt: skip
# System calls that are allowed by one argument, as far as the low half's bits under the mask are one of the values.
_CHECKED = {
    "clone": (56, 220, 0, 0x10000, (0x10000,)),  # CLONE_THREAD: threads may be started, processes not
    # access mode 3 and truncation by a reader pass Landlock, the latter in its first two versions
    "open": (2, None, 1, 0o1003, (0, 1, 2, 0o1001, 0o1002)),
    "openat": (257, 56, 2, 0o1003, (0, 1, 2, 0o1001, 0o1002)),
    "mkdir": (83, None, 1, 0o700, (0o700,)),  # what lies in a directory must be seen from outside, and go with it
    "mkdirat": (258, 34, 2, 0o700, (0o700,)),
    "umask": (95, 166, 0, 0o700, (0,)),
    # duplicates, flags, the size of a pipe; not owners, signals, leases, locks
    "fcntl": (72, 25, 1, _ALL_BITS, (0, 1, 2, 3, 4, 1030, 1032)),
    # whether it is a terminal and how large, bytes to read, non-blocking, close-on-exec
    "ioctl": (16, 29, 1, _ALL_BITS, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # what malloc and NumPy say of their own pages; not "page out" or "poison", which others would feel
    "madvise": (28, 233, 2, _ALL_BITS, (0, 1, 2, 3, 4, 8, 14, 15, 16, 17, 102, 103)),
    "prctl": (157, 167, 0, _ALL_BITS, (15, 16)),  # a thread's name
}  # fmt: skip
_UNKNOWN_HERE = (435, 437)  # clone3, openat2: libc then calls clone, openat, whose arguments can be checked
_LAST = 450  # later ones are not known either
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_EPERM, _ENOSYS = 1, 38
_EQUAL, _AT_LEAST = 0x10, 0x30  # tests of a jump
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_LANDLOCK_READ = 1 << 2 | 1 << 3 | 1 << 0  # read a file, list a directory, execute (map a library)
_LANDLOCK_NOWHERE = 1 << 0 | 1 << 6 | 1 << 11  # execute, make a character or block device
_LANDLOCK_SCOPED = 1 << 0 | 1 << 1  # abstract sockets, signals: not to a process outside; from ABI 6
_LANDLOCK_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # file-system access rights by ABI


def main() -> None:
    seconds, memory, file_size = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    contained, imports = int(sys.argv[4]), sys.argv[5:]
    try:
        _limit(seconds, memory, file_size)
        _drop_capabilities()
        _confine_files(imports)
        _confine_calls()
    except Exception as error:
        sys.exit(f"the sandbox cannot contain foreign code on this machine: {type(error).__name__}: {error}")
    os.eventfd_write(contained, 1)
    os.close(contained)
    shutil.copymode = shutil.copystat = lambda *_, **__: None  # a copy succeeds, with the mode and times of a new file
    sys.argv[:] = ["script.py"]
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)] + imports
    try:
        exec(compile(sys.stdin.buffer.read(), "script.py", "exec"), {"__name__": "__main__"})
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


def _drop_capabilities() -> None:
    """All but those to read and write whatever the mode, which Landlock confines."""
    header = struct.pack("<Ii", 0x20080522, 0)
    held = ctypes.create_string_buffer(24)
    if _libc.capget(header, held):
        raise OSError(ctypes.get_errno(), "capget")
    effective, permitted = struct.unpack_from("<II", held)
    kept = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if _libc.capset(header, struct.pack("<6I", effective & kept, permitted & kept, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")


def _confine_files(imports: list[str]) -> None:
    """Landlock: read Python's own directories, do everything in the working directory, nothing else."""
    abi = _syscall(444, None, 0, 1)
    rights = (1 << _LANDLOCK_BY_ABI.get(min(abi, 5), 13)) - 1
    attributes = struct.pack("<QQQ", rights, 0, _LANDLOCK_SCOPED if abi >= 6 else 0)
    ruleset = _syscall(444, attributes, len(attributes), 0)
    readable = {sys.prefix, sys.base_prefix, *imports, "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib"}
    for path in (*sorted(readable), "/dev/urandom", "/dev/null", "/etc/ld.so.cache"):
        if os.path.exists(path):
            allowed = _LANDLOCK_READ if os.path.isdir(path) else 1 << 2
            _allow(ruleset, path, allowed)
    _allow(ruleset, os.getcwd(), rights & ~_LANDLOCK_NOWHERE)
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
    """seccomp: allow what is on the lists, refuse the rest with EPERM."""
    machine = platform.machine()
    if machine not in _AUDIT:
        raise OSError(f"no list of system calls for {machine}")
    column = list(_AUDIT).index(machine)
    program = [_load(4), _jump(_EQUAL, _AUDIT[machine], 1, 0), _answer(_KILL), _load(0)]
    if machine == "x86_64":  # the x32 calls have numbers of their own
        program += [_jump(_AT_LEAST, 0x40000000, 0, 1), _answer(_KILL)]
    for numbers in _ALLOWED.values():
        if numbers[column] is not None:
            program += [_jump(_EQUAL, numbers[column], 0, 1), _answer(_ALLOW)]
    for *numbers, argument, mask, values in _CHECKED.values():
        if numbers[column] is not None:
            check = [_load(16 + 8 * argument), _masked(mask)]
            for value in values:
                check += [_jump(_EQUAL, value, 0, 1), _answer(_ALLOW)]
            check += [_answer(_ERRNO | _EPERM)]
            program += [_jump(_EQUAL, numbers[column], 0, len(check)), *check]
    for number in _UNKNOWN_HERE:
        program += [_jump(_EQUAL, number, 0, 1), _answer(_ERRNO | _ENOSYS)]
    program += [_jump(_AT_LEAST, _LAST + 1, 0, 1), _answer(_ERRNO | _ENOSYS), _answer(_ERRNO | _EPERM)]
    code = ctypes.create_string_buffer(b"".join(program))
    filter = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(filter))


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", 0x20, 0, 0, offset)


def _masked(mask: int) -> bytes:
    return struct.pack("<HBBI", 0x54, 0, 0, mask)


def _jump(test: int, value: int, yes: int, no: int) -> bytes:
    return struct.pack("<HBBI", 0x05 | test, yes, no, value)


def _answer(value: int) -> bytes:
    return struct.pack("<HBBI", 0x06, 0, 0, value)


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
