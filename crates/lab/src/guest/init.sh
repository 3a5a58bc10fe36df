#!/bin/busybox sh
# First process of a lab guest: loads the modules, mounts the tools or the root disk, and goes on
# as the agent that runs the host's scripts.
/bin/busybox mkdir -p /proc /sys /dev /tmp /mnt /tools /run
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
exec </dev/console >/dev/console 2>&1

while read -r module; do
	insmod "/modules/$module" || echo "FATHOM-LAB cannot load $module"
done </modules/order

if [ -n "$lab_root" ]; then
	mount -t ext4 -o ro "$(disk "$lab_root")" /sysroot || echo "FATHOM-LAB cannot mount the root disk"
	for dir in proc sys dev; do
		mount -o move "/$dir" "/sysroot/$dir"
	done
	exec switch_root /sysroot /sbin/init
fi

if [ -n "$lab_tools" ]; then
	if mount -t ext4 -o ro "$(disk "$lab_tools")" /tools; then
		ln -s /tools/lib64 /lib64
		ln -s /tools/lib /lib
		ln -s /tools/usr /usr
		cp /tools/etc/* /etc/
	else
		echo "FATHOM-LAB cannot mount the tools"
	fi
fi
ln -sf /proc/mounts /etc/mtab
export PATH=/usr/bin:/bin HOME=/tmp
exec agent
