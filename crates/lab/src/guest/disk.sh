#!/bin/busybox sh
# disk SLOT[.FUNCTION]: the block device below that PCI address (hexadecimal), on whatever bus,
# waiting for it to appear.
case "$1" in
*.*) address=$1 ;;
*) address=$1.0 ;;
esac
for attempt in $(seq 200); do
	for block in /sys/block/*; do
		case "$(cd -P "$block" 2>/dev/null && pwd)" in
		*/0000:00:"$address"/*)
			if [ -b "/dev/${block##*/}" ]; then
				echo "/dev/${block##*/}"
				exit 0
			fi
			;;
		esac
	done
	sleep 0.25
done
echo "no disk at PCI address $address" >&2
exit 1
