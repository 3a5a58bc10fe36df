#!/bin/busybox sh
# First process of a lab guest: loads the modules, mounts the tools, then runs the scripts that
# the host sends over a virtio-serial port.
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

port=
for candidate in /sys/class/virtio-ports/*; do
	[ "$(cat "$candidate/name")" = fathom.agent ] && port=/dev/${candidate##*/}
done
exec 3<>"$port"
echo FATHOM-LAB READY

# What a stuck guest can say about itself: its requests, its blocked tasks, its interrupts.
state() {
	echo "-- the script did not end in time --"
	grep -H . /sys/block/vd*/inflight
	cat /proc/interrupts
	echo w >/proc/sysrq-trigger
	dmesg | tail -n 60
}

# The script may hang where no signal reaches it, so it and its watchdog report to one pipe.
mkfifo /tmp/.ends
exec 4<>/tmp/.ends
run() {
	{ sh /tmp/.script >/tmp/.output 2>&1 </dev/null 4>&-; echo "$1 $?" >&4; } 3>&- &
	{ sleep "$2"; echo "$1 124" >&4; } 3>&- &
	watchdog=$!
	while read -r ended status <&4; do
		[ "$ended" = "$1" ] && break
	done
	kill "$watchdog" 2>/dev/null
	[ "$status" != 124 ] || state >>/tmp/.output 2>&1
}

# One line a request, "id seconds base64(script)"; one line an answer, "id status base64(output)".
# A read of nothing means that the host is away (it comes back after a migration).
while :; do
	while read -r id limit script <&3; do
		echo "$script" | base64 -d >/tmp/.script
		run "$id" "$limit"
		echo "$id $status $(base64 -w 0 /tmp/.output)" >&3
	done
	sleep 0.05
done
