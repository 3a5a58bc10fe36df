#!/bin/sh
# Makes pages for a browser of docs/: `book.sh FATHOM TARGET`, the program and the folder. The page of
# commands is what the program says of itself.
set -eu
fathom=$(realpath "$1")
target=$2
source=$target.source

rm -rf "$source"
mkdir -p "$(dirname "$target")"
cp -r "$(dirname "$0")/../docs" "$source"
mkdir -p "$source.man"
"$fathom" man "$source.man" >/dev/null
{
	printf '# Commands\n\nWhat each command says with `--help`; after installation also as manual pages.\n'
	for page in "$source.man"/*.1; do
		# fathom-disk-add.1 is of `fathom disk add`; no command has a hyphen in its name.
		command=$(basename "$page" .1 | tr - ' ')
		printf '\n## %s\n\n```text\n' "$command"
		# shellcheck disable=SC2086
		"$fathom" ${command#fathom} --help
		printf '```\n'
	done
} >"$source/commands.md"
rm -rf "$source.man" "$target"
mdbook build --dest-dir "$(realpath -m "$target")" "$source"
rm -rf "$source"
