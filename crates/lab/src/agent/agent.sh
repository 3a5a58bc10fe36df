#!/bin/busybox sh
# Runs the scripts that the host sends: over descriptor 3 where it is inherited, else over the port
# fathom.agent. Programs may write to the host through /tmp/.ports/fathom.data.
mkdir -p /tmp/.ports
if [ -n "$lab_line" ]; then
	# User-mode Linux has a serial line instead: bytes are to go through as they are.
	stty -F "$lab_line" raw -echo && ln -sf "$lab_line" /tmp/.ports/fathom.agent
elif [ -z "$lab_inherited" ]; then
	# They come one by one, and get their names, a moment after their driver.
	until [ -e /tmp/.ports/fathom.signal ]; do
		for port in /sys/class/virtio-ports/*; do
			[ ! -s "$port/name" ] || ln -sf "/dev/${port##*/}" "/tmp/.ports/$(cat "$port/name")"
		done
		[ -e /tmp/.ports/fathom.signal ] || sleep 0.01
	done
fi
[ -n "$lab_inherited" ] || exec 3<>/tmp/.ports/fathom.agent
# Through the kernel, whose own messages would tear a line of ours.
if [ -z "$lab_inherited" ] && [ -c /dev/kmsg ]; then
	echo '<0>FATHOM-LAB READY' >/dev/kmsg
else
	echo 'FATHOM-LAB READY'
fi

# What a stuck guest can say about itself: its requests, its blocked tasks, its interrupts.
state() {
	echo "-- the script did not end in time --"
	grep -H . /sys/block/*/inflight
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
# A read of nothing means that the host is away: a port's comes back after a migration.
while :; do
	while read -r id limit script <&3; do
		echo "$script" | base64 -d >/tmp/.script
		run "$id" "$limit"
		echo "$id $status $(base64 -w 0 /tmp/.output)" >&3
	done
	[ -z "$lab_inherited" ] || exit 0
	sleep 0.05
done
