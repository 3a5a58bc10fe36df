#!/bin/sh
# Makes the Debian package, and one of its debug symbols, of what is built: build.sh VERSION
set -eu

version=$1
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}
files=$target/installed/package
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH="$epoch"

rm -rf "$files"
make --no-print-directory install-files DESTDIR="$files" PREFIX=/usr sysconfdir=/etc \
	zshcompdir=/usr/share/zsh/vendor-completions
# cargo-deb takes the unit from where it is.
rm -r "$files/usr/lib"
mkdir -p "$files/usr/share/doc/fathom" "$files/usr/share/lintian/overrides"
cp -r README.md docs "$files/usr/share/doc/fathom/"
python3 packaging/debian/licences.py > "$files/usr/share/doc/fathom/licences-of-crates"
cp packaging/debian/lintian-overrides "$files/usr/share/lintian/overrides/fathom"
cp CHANGELOG.md "$files/usr/share/doc/fathom/changelog"
# Debian's own changelog has nothing to say but where the other one is.
{
	printf 'fathom (%s) unstable; urgency=medium\n\n' "$version"
	printf '  * See changelog.gz.\n\n'
	printf ' -- %s  %s\n' "$(sed -n 's/^maintainer = "\(.*\)"/\1/p' crates/cli/Cargo.toml)" \
		"$(date -uR -d "@$epoch")"
} > "$files/usr/share/doc/fathom/changelog.Debian"
find "$files/usr/share/man" "$files/usr/share/doc/fathom" -name '*[.]1' -type f -o -name '*[.]5' -type f \
	-o -name 'changelog*' -type f -o -name licences-of-crates | xargs gzip -9nf
find "$files/usr/share/man" -type l | while read -r link; do
	ln -s "$(readlink "$link").gz" "$link.gz"
	rm "$link"
done
cargo deb --package fathom-cli --no-build --profile installed --dbgsym --deb-version "$version" \
	--output "$target/debian/"
