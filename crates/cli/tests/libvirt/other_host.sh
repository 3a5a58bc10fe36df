# The host to which a guest migrates. What happens on it is written to files, as its directories are not those of the caller.
set -eu
UUID=0a7d3c0e-7f6c-4a86-9d7e-222222222222
HOST=$DIR/other
. "$DIR/world.sh"
start_server
start_libvirt
touch "$HOST/ready"
while sleep 0.2; do
	"$FATHOM" list --json >"$HOST/new" && mv "$HOST/new" "$HOST/list"
done
