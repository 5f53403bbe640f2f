{{- /*
The metadata of an object, of which only the name is its own: a list of the root and the name.
*/ -}}
{{- define "meshquota.metadata" -}}
{{- $root := first . -}}
name: {{ last . | toJson }}
namespace: {{ $root.Release.Namespace | toJson }}
{{- with $root.Values.labels }}
labels: {{ toJson . }}
{{- end }}
{{- with $root.Values.annotations }}
annotations: {{ toJson . }}
{{- end }}
{{- end -}}
