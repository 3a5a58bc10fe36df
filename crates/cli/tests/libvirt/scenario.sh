# Starts, stops, kills and migrates guests of libvirt, and looks at the disks of the server.
set -eu
DIR=$PWD
HOST=$DIR/here
UUID=0a7d3c0e-7f6c-4a86-9d7e-111111111111
PATH=$PATH:/usr/sbin:/sbin
export DIR HOOK
# QEMU runs as another user.
chmod 755 "$DIR"
mkdir -m 755 "$HOST" "$DIR/other"
trap 'status=$?; [ $status = 0 ] || tail -n 30 "$DIR"/*/*.log "$DIR/other.log"; exit $status' EXIT
. ./world.sh
start_server
start_libvirt
there="qemu+unix:///system?socket=$DIR/other/libvirt/libvirt-sock"
export LIBVIRT_DEFAULT_URI="qemu+unix:///system?socket=$HOST/libvirt/libvirt-sock"

define() { # IMAGE [ATTRIBUTES]
	cat >"$DIR/web.xml" <<END
<domain type='qemu'>
  <name>web</name>
  <uuid>6ba7b810-9dad-11d1-80b4-00c04fd430c8</uuid>
  <memory unit='MiB'>64</memory>
  <metadata>
    <fathom:disks xmlns:fathom='urn:fathom:libvirt:1'>
      <fathom:disk target='vda' image='$1' ${2-}/>
    </fathom:disks>
  </metadata>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <features><acpi/></features>
  <devices>
    <emulator>$(command -v qemu-system-x86_64)</emulator>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw'/>
      <source type='unix' path='/run/fathom/web.sock'><reconnect enabled='yes' timeout='1'/></source>
      <target dev='vda' bus='virtio'/>
    </disk>
  </devices>
</domain>
END
	virsh define "$DIR/web.xml"
}

list() { "$FATHOM" list --json; }
has_disk() { list | grep -q '"name":"web-vda"'; }
is_in_use() { "$FATHOM" info web-vda | grep -q '^front-end:  process'; }
has_no_disk() { ! has_disk && [ -z "$(ls "$HOST/disks.d")" ] && [ -z "$(ls /run/fathom-libvirt)" ]; }
fails() { # WORDS COMMAND...
	words=$1
	shift
	if "$@" >"$DIR/said" 2>&1; then
		echo "succeeded: $*"
		return 1
	fi
	grep -q "$words" "$DIR/said" || { cat "$DIR/said"; return 1; }
}

echo "--- define and start are all"
"$FATHOM" img create -q -f qcow2 "$DIR/web.qcow2" 64M
define "$DIR/web.qcow2" "format='qcow2' iothreads='2'"
virsh start web
wait_for is_in_use
ps -eo user:20,comm | grep '^libvirt-qemu *qemu-system'
list | grep -q '"owner":"persistent"'
virsh destroy web
wait_for has_no_disk

echo "--- a disk that cannot be added: the guest does not start, and virsh says why"
define "$DIR/none.qcow2" "format='qcow2'"
fails none.qcow2 virsh start web
has_no_disk
define "$DIR/web.qcow2" "format='qcow2' chache='none'"
fails chache virsh start web
has_no_disk

echo "--- an image that another process writes to"
define "$DIR/web.qcow2" "format='qcow2'"
# (The check below opens the image, too: qemu-io fails if it opens the image at the same time.)
(until qemu-io -f qcow2 "$DIR/web.qcow2" -c 'sleep 1000000' >/dev/null 2>&1; do sleep 0.1; done) &
holder=$!
wait_for "! qemu-img info $DIR/web.qcow2 >/dev/null 2>&1"
fails 'in use by' virsh start web
has_no_disk
kill $holder
pkill -f 'qemu-io -f'
wait_for "qemu-img info $DIR/web.qcow2 >/dev/null 2>&1"

echo "--- a disk of this name that is not the domain's stays as it is"
"$FATHOM" disk add web-vda memory:1M --vhost-user /run/fathom/other.sock
fails 'other options' virsh start web
list | grep -q '"disk":"memory:1048576"'
"$FATHOM" disk remove web-vda
has_no_disk

echo "--- the server is killed, and comes back"
virsh start web
wait_for is_in_use
kill -9 $server
wait "$server" || true
start_server
wait_for is_in_use
echo "--- QEMU is killed"
pkill -9 -f 'guest=web'
wait_for has_no_disk

echo "--- the guest migrates"
virsh start web
wait_for is_in_use
unshare --mount bash other_host.sh >"$DIR/other.log" 2>&1 &
wait_for "[ -e $DIR/other/ready ]"
# (QEMU makes the socket.)
mkdir -m 777 "$DIR/migration"
virsh migrate --live web "$there" --migrateuri "unix://$DIR/migration/socket"
wait_for has_no_disk
wait_for "grep -q '\"name\":\"web-vda\"' $DIR/other/list"
virsh -c "$there" list --name | grep -q web
virsh -c "$there" destroy web
wait_for "! grep -q '\"name\":\"web-vda\"' $DIR/other/list"
echo done
