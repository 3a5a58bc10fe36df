#!/bin/busybox sh
# disk SLOT: the block device at that PCI slot (hexadecimal), waiting for it to appear.
for attempt in $(seq 200); do
	for block in /sys/bus/pci/devices/0000:00:$1.0/virtio*/block/*; do
		if [ -e "$block" ] && [ -b "/dev/${block##*/}" ]; then
			echo "/dev/${block##*/}"
			exit 0
		fi
	done
	sleep 0.25
done
echo "no disk at PCI slot $1" >&2
exit 1
