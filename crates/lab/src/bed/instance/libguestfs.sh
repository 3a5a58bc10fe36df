# Drives an appliance of libguestfs for the host's agent: libguestfs.sh DIR IMAGE [MIB]. Requests come by
# descriptor 3 as to the agent (agent.sh), data by descriptor 5. Commands of guestfish end it when they
# fail, so a script's status is the first line that comes back.
dir=$1 image=$2 memory=$3
eval "$(guestfish --listen)"
ask() { guestfish --remote "$@"; }
# By the appliance's shell.
inside() { ask debug sh "$1"; }
set -e
[ -z "$memory" ] || ask set-memsize "$memory"
ask add-drive "$image" format:raw
ask run
# What our scripts mount is where libguestfs has its own root.
inside 'ln -s /sysroot /mnt'
echo 'FATHOM-LAB READY'
set +e

# A script with so many bytes on its standard input, sent by libguestfs's own upload. It wants something
# to be mounted.
upload() {
	inside 'mountpoint -q /sysroot || mount -t tmpfs none /sysroot
		mkfifo /sysroot/in
		(sh /tmp/script </sysroot/in >/tmp/output 2>&1; echo $? >/tmp/status) >/dev/null 2>&1 &'
	mkfifo "$dir/up"
	head -c "$1" <&5 >"$dir/up" &
	ask upload "$dir/up" /in
	inside 'until [ -s /tmp/status ]; do sleep 0.01; done
		cat /tmp/status /tmp/output
		rm -f /sysroot/in /tmp/status'
	rm "$dir/up"
}

while read -r id _ script <&3; do
	bytes=$(echo "$script" | base64 -d | sed -n '/^# upload /{s///p;q}')
	inside "echo $script | base64 -d >/tmp/script" >/dev/null
	if [ -n "$bytes" ]; then
		upload "$bytes"
	else
		inside 'sh /tmp/script >/tmp/output 2>&1 </dev/null; echo $?; cat /tmp/output'
	fi >"$dir/output"
	status=$(sed -n '/./{p;q}' "$dir/output")
	echo "$id ${status:-125} $(sed '0,/./d' "$dir/output" | base64 -w 0)" >&3
done
ask exit
