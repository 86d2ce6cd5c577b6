//! Layout of charts.

use roxmltree::Node;

/// A rectangle: left, top, right, bottom.
type Area = [f64; 4];

fn number(node: Node, name: &str) -> Option<f64> {
    node.attribute(name)?.parse().ok()
}

/// The numbers of `translate(a b)`, and whether the content is rotated to the left.
fn transform(node: Node) -> ((f64, f64), bool) {
    let Some(text) = node.attribute("transform") else {
        return ((0.0, 0.0), false);
    };
    let (_, rest) = text.split_once("translate(").expect(text);
    let (place, _) = rest.split_once(')').unwrap();
    let mut place = place.split(' ').map(|n| n.parse::<f64>().unwrap());
    let place = (place.next().unwrap(), place.next().unwrap());
    (place, text.contains("rotate(-90)"))
}

/// Position of a node in the picture.
fn origin(node: Node) -> (f64, f64) {
    node.ancestors()
        .filter(|n| n.is_element())
        .fold((0.0, 0.0), |(x, y), n| {
            let ((dx, dy), _) = transform(n);
            (x + dx, y + dy)
        })
}

/// Approximate area of a text, in a common font.
fn text_area(node: Node) -> Area {
    let text = node.text().unwrap_or_default().to_owned();
    let height = number(node, "font-size").unwrap_or(12.0);
    let width = text.chars().count() as f64 * height * 0.55;
    let from = match node.attribute("text-anchor") {
        Some("middle") => -width / 2.0,
        Some("end") => -width,
        _ => 0.0,
    };
    let (x, y) = origin(node);
    if transform(node).1 {
        return [
            x - 0.8 * height,
            y - from - width,
            x + 0.2 * height,
            y - from,
        ];
    }
    let (x, y) = (
        x + number(node, "x").unwrap_or(0.0) + from,
        y + number(node, "y").unwrap_or(0.0),
    );
    [x, y - 0.8 * height, x + width, y + 0.2 * height]
}

fn union(areas: impl Iterator<Item = Area>) -> Option<Area> {
    areas.reduce(|a, b| {
        [
            a[0].min(b[0]),
            a[1].min(b[1]),
            a[2].max(b[2]),
            a[3].max(b[3]),
        ]
    })
}

fn touch(a: &Area, b: &Area) -> bool {
    a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]
}

/// All drawn elements: texts separately, with those of legends.
pub fn look(svg: &str, whose: &str) {
    let document = roxmltree::Document::parse(svg).expect(whose);
    let root = document.root_element();
    let view: Vec<f64> = root
        .attribute("viewBox")
        .expect(whose)
        .split(' ')
        .map(|n| n.parse().unwrap())
        .collect();
    let inside = |area: &Area, what: &str| {
        let [left, top, right, bottom] = *area;
        assert!(
            left >= 0.0 && top >= 0.0 && right <= view[2] && bottom <= view[3],
            "{whose}: {what} at {area:?} leaves the picture of {view:?}"
        );
    };
    let mut texts: Vec<(String, Area)> = Vec::new();
    for node in root.descendants().filter(|n| n.has_tag_name("text")) {
        let text = node.text().unwrap_or_default().to_owned();
        let area = text_area(node);
        inside(&area, &text);
        texts.push((text, area));
    }
    for (i, (text, area)) in texts.iter().enumerate() {
        let other = texts[i + 1..].iter().find(|(_, other)| touch(area, other));
        assert!(
            other.is_none(),
            "{whose}: {text:?} at {area:?} lies on {other:?}"
        );
    }
    for node in root
        .descendants()
        .filter(|n| n.has_tag_name("rect") && number(*n, "x").is_some())
    {
        let (x, y) = origin(node);
        let [left, top, w, h] =
            ["x", "y", "width", "height"].map(|name| number(node, name).unwrap());
        inside(&[x + left, y + top, x + left + w, y + top + h], "a bar");
    }
    let is_legend = |n: &Node| n.attribute("class") == Some("legend");
    let mut legends = 0;
    for legend in root.descendants().filter(is_legend) {
        let within = |n: &Node| n.has_tag_name("text");
        let mine: Vec<Area> = legend.descendants().filter(within).map(text_area).collect();
        let Some(area) = union(mine.iter().copied()) else {
            continue;
        };
        let under = texts
            .iter()
            .find(|(_, a)| touch(&area, a) && !mine.contains(a));
        assert!(
            under.is_none(),
            "{whose}: {under:?} lies under the legend at {area:?}"
        );
        legends += 1;
    }
    assert!(legends > 0, "{whose} has no legend");
}
