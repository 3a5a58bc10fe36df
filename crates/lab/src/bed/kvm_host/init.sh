#!/bin/busybox sh
# First process on the KVM host's own disk: a machine with a kernel, QEMU and fathom in the usual
# places, a disk of its own below /var/tmp, and the agent.
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
mount -t ext4 -o ro "$(disk "$lab_fathom")" /opt || echo "FATHOM-LAB cannot mount fathom's disk"
for dir in lib lib64 usr; do
    [ ! -d /opt/over/$dir ] || mount -t overlay -o lowerdir=/opt/over/$dir:/$dir overlay /$dir ||
        echo "FATHOM-LAB cannot lay the second disk over /$dir"
done
mount -t ext4 "$(disk "$lab_scratch")" /var/tmp || echo "FATHOM-LAB cannot mount the scratch disk"
ip link set lo up
export PATH=/opt:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp TMPDIR=/tmp
cd /tmp
exec agent
