# What virt-df does with $device, and the package database of a Debian: a line for each thing found.
for part in "$device"*; do
	mount -o ro "$part" /mnt 2>/dev/null || continue
	name=${part##*/}
	type=$(sed -n "s,^[^ ]* /mnt \([^ ]*\) .*,\1,p" /proc/mounts)
	echo "fs $name $(cat "/sys/class/block/$name/size") $type $(stat -f -c '%S %b %f' /mnt)"
	status=/mnt/var/lib/dpkg/status
	if [ -f "$status" ]; then
		sed -n 's/^PRETTY_NAME="\{0,1\}\([^"]*\)"\{0,1\}$/os \1/p' /mnt/etc/os-release
		echo "packages $(grep -c '^Status: install ok installed$' "$status") $(wc -c <"$status")"
	fi
	umount /mnt
done
