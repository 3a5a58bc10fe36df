# Sourced: a host of its own with libvirt and a server. What libvirt keeps is in memory. Needs root, $FATHOM, and in $UUID
# the host's. The server and libvirt run in $HOST, an existing directory.
for dir in /run /etc/libvirt /var/lib/libvirt /var/log/libvirt /var/cache/libvirt; do
	mkdir -p $dir
	mount -t tmpfs none $dir
done
mkdir -p /run/fathom /run/lock /etc/libvirt/hooks/qemu.d /var/lib/libvirt/qemu
# The user that the package libvirt-daemon-system makes.
for file in passwd group; do
	grep -v '^libvirt-qemu:' /etc/$file >/run/$file
done
echo 'libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin' >>/run/passwd
echo 'libvirt-qemu:x:64055:' >>/run/group
for file in passwd group; do
	mount --bind /run/$file /etc/$file
done
cat >/etc/libvirt/qemu.conf <<'END'
security_driver = "none"
stdio_handler = "file"
cgroup_controllers = []
namespaces = []
END
cat >/etc/libvirt/libvirtd.conf <<END
auth_unix_rw = "none"
host_uuid = "$UUID"
unix_sock_dir = "$HOST/libvirt"
END
sed "s,/usr/bin/fathom,$FATHOM," "$HOOK" >/etc/libvirt/hooks/qemu.d/fathom
chmod 755 /etc/libvirt/hooks/qemu.d/fathom
mkdir -p "$HOST/libvirt"
cat >"$HOST/fathom.toml" <<END
api = { socket = "/run/fathom/api.sock" }
disks-dir = "$HOST/disks.d"
END

# Starts a server; $server is its process id.
start_server() {
	(cd "$HOST" && exec "$FATHOM" serve --config fathom.toml >>"$HOST/server.log" 2>&1) &
	server=$!
	wait_for "[ -S /run/fathom/api.sock ] && $FATHOM list --json >/dev/null"
}

# Waits until a command succeeds.
wait_for() {
	for try in $(seq 900); do
		if eval "$1"; then
			return 0
		fi
		sleep 0.2
	done
	echo "in vain: $1"
	return 1
}

start_libvirt() {
	libvirtd >"$HOST/libvirtd.log" 2>&1 &
	wait_for "[ -S $HOST/libvirt/libvirt-sock ]"
}
