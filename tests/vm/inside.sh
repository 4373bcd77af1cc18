#!/bin/bash
# Process 1 of the machine that run.sh starts: a bare system with cgroup v2, the command, power off.
mode=$1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mkdir -m 1777 /scratch
mount -t tmpfs -o mode=1777 scratch /scratch # not on the overlay: trees of tests are overlays themselves
export TMPDIR=/scratch HOME=/scratch/home
mkdir -m 777 "$HOME"
ip link set lo up 2>/dev/null || busybox ifconfig lo up
echo "vm: $(uname -r), $mode, controllers: $(cat /sys/fs/cgroup/cgroup.controllers)"
if [ "$mode" = user ]; then
    # What systemd does for a scope with Delegate=yes: controllers handed down, the group's own files the user's.
    group=/sys/fs/cgroup/user.slice/task.scope
    echo "+memory +pids +cpu" >/sys/fs/cgroup/cgroup.subtree_control
    mkdir -p "$group"
    echo "+memory +pids +cpu" >/sys/fs/cgroup/user.slice/cgroup.subtree_control
    chown 1000:1000 "$group" "$group"/cgroup.{procs,threads,subtree_control}
    (echo 0 >"$group/cgroup.procs" && exec setpriv --reuid 1000 --regid 1000 --clear-groups /command)
else
    /command
fi
echo "vm: exit $?"
sync
echo o >/proc/sysrq-trigger
sleep 60
