"""Reads a trace with Perfetto's published schema, checks its rules, and prints what it shows.

The rules are those of protos/perfetto/trace/track_event/track_event.proto: every event names a
track that is described, names are interned before they are used, slices of a track nest, and a
flow has at least two slices and ends once. Unknown fields are errors: the schema has none for us.
"""

import collections
import json
import sys

from google.protobuf import unknown_fields
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

BEGIN, END, INSTANT = 1, 2, 3


def no_unknown_fields(message):
    unknown = unknown_fields.UnknownFieldSet(message)
    assert len(unknown) == 0, f"{message.DESCRIPTOR.name}: unknown field {unknown[0].field_number}"
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                no_unknown_fields(inner)


def annotations(event):
    values = {}
    for one in event.debug_annotations:
        kind = one.WhichOneof("value")
        values[one.name] = getattr(one, kind)
    return values


def path(tracks, uuid):
    track = tracks[uuid]
    if track.HasField("thread"):
        return f"thread {track.thread.pid}/{track.thread.tid} {track.thread.thread_name}"
    above = path(tracks, track.parent_uuid) + " > " if track.parent_uuid else ""
    return above + track.name


def main():
    trace = schema.Trace()
    with open(sys.argv[1], "rb") as file:
        trace.ParseFromString(file.read())
    tracks, names = {}, {}
    open_slices, last = collections.defaultdict(list), collections.defaultdict(int)
    slices, instants, flows = [], [], collections.defaultdict(list)
    for packet in trace.packet:
        no_unknown_fields(packet)
        assert packet.trusted_packet_sequence_id == 1
        for entry in packet.interned_data.event_names:
            assert entry.iid not in names
            names[entry.iid] = entry.name
        if packet.HasField("track_descriptor"):
            uuid = packet.track_descriptor.uuid
            assert uuid not in tracks
            tracks[uuid] = packet.track_descriptor
        if not packet.HasField("track_event"):
            continue
        event, at = packet.track_event, packet.timestamp
        track = event.track_uuid
        assert track in tracks, f"track {track} is not described"
        assert at >= last[track], f"{path(tracks, track)}: {at} after {last[track]}"
        last[track] = at
        if event.type == END:
            open_slices[track].pop()["end"] = at
            continue
        name = names[event.name_iid] if event.name_iid else event.name
        assert name
        one = {
            "track": path(tracks, track),
            "name": name,
            "start": at,
            "depth": len(open_slices[track]),
            "said": annotations(event),
        }
        if event.type == INSTANT:
            instants.append(one)
            continue
        assert event.type == BEGIN
        open_slices[track].append(one)
        slices.append(one)
        for flow in event.flow_ids:
            flows[flow].append([one, False])
        for flow in event.terminating_flow_ids:
            flows[flow].append([one, True])
    for track, left in open_slices.items():
        assert not left, f"{path(tracks, track)}: {left[0]['name']} does not end"
    for flow, steps in flows.items():
        assert len(steps) > 1, f"flow {flow} has one slice"
        ends = [index for index, (_, last_one) in enumerate(steps) if last_one]
        assert ends in ([], [len(steps) - 1]), f"flow {flow} ends at {ends} of {len(steps)}"
    shown = {
        flow: [[one["track"], one["name"], one["start"]] for one, _ in steps]
        for flow, steps in flows.items()
    }
    json.dump({"slices": slices, "instants": instants, "flows": shown}, sys.stdout)


main()
