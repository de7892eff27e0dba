#!/bin/sh
# Installs Debian's Slurm for tests/slurm, without starting its services. Needs root, or sudo without a password.
set -eu
packages="slurmctld slurmd slurm-client munge"
become=""
[ "$(id -u)" = 0 ] || become="sudo -n"
command -v apt-get >/dev/null || { echo "no apt-get here: install $packages by other means" >&2; exit 1; }
[ -z "$become" ] || $become true || { echo "not root, and sudo wants a password: install $packages" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1  # at runlevel 1 packages start no services
install="$become apt-get install -y --no-install-recommends $packages"
$install || { $become apt-get update && $install; }
